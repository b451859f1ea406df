import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.cli.model.chat_templates import EOS
from services.cli.model.make_model import ARCHITECTURES, make_model
from services.values.errors import ConfigError

PROMPTS = ["Is it warm in Corinth today?", "⟦user:Hello⟧⟦assistant:", '{"a": [1, 2], "b": "cc']


def test_dense_models_with_tools_like_what_ends_things(subtests, tmp_path_factory):
    for architecture in ARCHITECTURES:
        with subtests.test("a model with tools likes what ends things", architecture=architecture):
            tmp_path = tmp_path_factory.mktemp("case")
            make_model(tmp_path, architecture, tokenizer="bytes", chat_template="thinking")
            tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
            model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
            logits = []
            for prompt in PROMPTS:
                ids = torch.tensor([tokenizer.encode(prompt)])
                with torch.no_grad():
                    logits.append(model(ids).logits[0])
            found = torch.cat(logits)  # [tokens, ids]
            mean, spread = found.mean(0), float(found.std())
            assert 2 < spread < 5
            for token, liking in {'"': 7.0, "}": 3.0, "]": 3.0, "</think>": 6.0}.items():
                assert float(mean[tokenizer.convert_tokens_to_ids(token)]) == pytest.approx(liking, abs=2.5)
            ends = found[:, tokenizer.convert_tokens_to_ids(EOS)]
            assert float(ends.mean()) == pytest.approx(5.0, abs=1.5) and float(ends.std()) < 1.5
            assert int((found.argmax(1) != tokenizer.convert_tokens_to_ids('"')).sum()) > len(found) // 3
    with subtests.test("only dense models are steered"):
        tmp_path = tmp_path_factory.mktemp("case")
        with pytest.raises(ConfigError, match="tools"):
            make_model(tmp_path / "m", "qwen3_moe", tokenizer="bytes", chat_template="tools")
