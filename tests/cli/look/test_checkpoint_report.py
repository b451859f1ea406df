"""`isthmus check DIR`: what it says of known models, and who serves them."""

import json
import re

import pytest

from exactness.checkpoints import tiny_checkpoint
from exactness.model_configs import (
    DEEPSEEK_V3,
    GPT_OSS_120B,
    LLAMA_3_1_8B,
    LLAMA_4_SCOUT,
    MISTRAL_7B,
    QWEN3_5_35B_A3B,
)
from services.cli.look import check
from services.cli.look.check import CheckpointConfig, report
from services.cli.look.size import most_tail_pages, running_pages
from services.kv.tails import tail_pages
from services.model.layer_groups import layer_groups
from services.values.errors import ConfigError


def said(checkpoint, **settings):
    return report(CheckpointConfig(directory=".", **settings), checkpoint)


def cells(line):
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_reports(subtests, tmp_path):
    with subtests.test("a recurrent model"):
        lines = said(QWEN3_5_35B_A3B)
        assert lines[0] == "Qwen3_5MoeForConditionalGeneration, bfloat16, 262144 tokens of context"
        assert [cells(line) for line in lines[4:6]] == [
            ["full attention", "10", "2 KV heads of 256 of every token", "20.0 KiB a token"],
            [
                "recurrent",
                "30",
                "64.0 KiB of convolution, 2.0 MiB in float32, a layer",
                "61.9 MiB a state, as 3168 tokens of full attention",
            ],
        ]
        assert lines[-1] == (
            "From prefill to decode: 20.0 KiB for each token of the delta, and 61.9 MiB however short it is."
        )
    with subtests.test("a draft model"):
        draft = {**LLAMA_3_1_8B, "num_hidden_layers": 4, "num_key_value_heads": 2}
        (tmp_path / "config.json").write_text(json.dumps(draft))
        token = "Of the draft model 4.0 KiB more for each token (bfloat16), where prefill ranks have it, too."
        assert said(LLAMA_3_1_8B, draft_model=tmp_path)[-1] == token
        (tmp_path / "config.json").write_text(json.dumps({**draft, "vocab_size": 7}))
        with pytest.raises(ConfigError, match="vocabulary has 7 ids, the model's 128256"):
            said(LLAMA_3_1_8B, draft_model=tmp_path)
        (tmp_path / "config.json").write_text(json.dumps({**QWEN3_5_35B_A3B}))
        with pytest.raises(ConfigError, match="recurrent layers cannot draft"):
            said(QWEN3_5_35B_A3B, draft_model=tmp_path)
    with subtests.test("a windowed model"):
        lines = said(GPT_OSS_120B, page_size=16)
        assert cells(lines[5]) == [
            "sliding window",
            "18",
            "8 KV heads of 64 of the last 128 tokens",
            "up to 5.1 MiB a tail",  # 9 pages of 16 tokens
        ]
    with subtests.test("a chunked model"):
        lines = said(LLAMA_4_SCOUT)
        assert cells(lines[5])[:3] == [
            "chunked window",
            "36",
            "8 KV heads of 128 since the last multiple of 8192 tokens",
        ]
    for checkpoint, kept in [
        (DEEPSEEK_V3, "a latent of 576 of every token"),
        (MISTRAL_7B, "8 KV heads of 128 of every token (of which a layer sees 4096)"),
    ]:
        with subtests.test("models that carry nothing", checkpoint=checkpoint, kept=kept):
            lines = said(checkpoint)
            assert cells(lines[4])[2] == kept
            assert lines[-1].endswith("of the delta, and nothing else.")
    for page_size in [1, 16, 64, 100]:
        for checkpoint in [GPT_OSS_120B, LLAMA_4_SCOUT]:
            with subtests.test(
                "no tail is longer and one is as long", page_size=page_size, checkpoint=checkpoint
            ):
                (window,) = layer_groups(checkpoint).windows
                group = window.in_layout("bfloat16", page_size)
                lengths = [
                    len(tail_pages(group, position, page_size)) for position in range(3 * window.window)
                ]
                assert max(lengths) == most_tail_pages(window, page_size)
                assert most_tail_pages(window, page_size) <= running_pages(window, page_size, 1)


def test_who_serves_it(subtests, capsys, tmp_path_factory):
    with subtests.test("who serves it is the exit code"):
        tmp_path = tmp_path_factory.mktemp("case")
        assert check.run([str(tiny_checkpoint("llama"))]) == 0
        *_, torch, sglang = capsys.readouterr().out.splitlines()
        assert (
            torch == "torch   serves it, if at start the model in chunks and token by token "
            "is the model in one pass"
        )
        assert sglang == "sglang  serves it"
        unknown = {**LLAMA_3_1_8B, "compress_ratios": [0, 4], "quantization_config": {"quant_method": "fp8"}}
        (tmp_path / "config.json").write_text(json.dumps(unknown))
        assert check.run([str(tmp_path)]) == 1
        *_, torch, sglang = capsys.readouterr().out.splitlines()
        assert torch.startswith("torch   refuses it: ")
        assert sglang.startswith(
            "sglang  refuses it: no model for --engine=sglang: its config.json says compress"
        )
    with subtests.test("how weights are quantized is told, and what is not read refused by name"):
        for method, title, torch_says in [
            ("fp8", "bfloat16, weights quantized (fp8), 131072 tokens", "has no safetensors weights"),
            (
                "quark",
                "bfloat16, weights quantized (otherwise), 131072 tokens",
                "quantized by 'quark' are not",
            ),
        ]:
            quantized = {
                **LLAMA_3_1_8B,
                "model_type": "llama",
                "quantization_config": {"quant_method": method},
            }
            (tmp_path / "config.json").write_text(json.dumps(quantized))
            check.run([str(tmp_path)])
            first, *_, torch, sglang = capsys.readouterr().out.splitlines()
            assert title in first
            assert sglang == "sglang  may serve it: SGLang decides about quantized weights"
            assert re.search(torch_says, torch)
    with subtests.test("a quantization_config that is no object is refused"):
        (tmp_path / "config.json").write_text(
            json.dumps({**LLAMA_3_1_8B, "model_type": "llama", "quantization_config": "fp8"})
        )
        assert check.run([str(tmp_path)]) == 1
        *_, torch, sglang = capsys.readouterr().out.splitlines()
        assert "refuses it: " in torch
        assert sglang == "sglang  refuses it: config.json's quantization_config is no object: 'fp8'"
    for architecture, said in [
        ("gpt_oss", "windows kept whole: 1.0 KiB a token"),
        ("qwen3_next", "finds a prefix only where it kept a state"),
    ]:
        with subtests.test("what sglang does otherwise is said", architecture=architecture, said=said):
            assert check.run([str(tiny_checkpoint(architecture))]) == 0
            assert said in capsys.readouterr().out.splitlines()[-1]
    with subtests.test("a config that does not suffice is told and who refuses it"):
        tmp_path = tmp_path_factory.mktemp("case")
        assert check.run([str(tiny_checkpoint("jamba"))]) == 1
        first, *_, torch, sglang = capsys.readouterr().out.splitlines()
        assert (
            torch == "torch   refuses it: it fails the check at start: its scan begins each chunk from zeros"
        )
        assert first.endswith("it does not tell the size of a recurrent layer's state")
        assert sglang.startswith("sglang  refuses it: ")
        with pytest.raises(ConfigError, match="cannot be read"):
            check.run([str(tmp_path / "nowhere")])
