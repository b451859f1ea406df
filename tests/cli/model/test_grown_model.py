"""`isthmus make-model --grown-from`: a target that the small one foretells as often as it says."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from exactness.checkpoints import tiny_checkpoint
from exactness.reference import random_prompt
from services.cli.model.make_model import run
from services.values.errors import ConfigError


def agreement(small, grown):
    """Of greedy tokens."""
    same = total = 0
    for seed in range(3):
        ids = torch.tensor([random_prompt(40, seed=seed)])
        with torch.inference_mode():
            ids = grown.generate(ids, max_new_tokens=100, do_sample=False, eos_token_id=None, pad_token_id=0)
            theirs, ours = (model(ids).logits[0, 39:-1].argmax(-1) for model in (small, grown))
        same, total = same + int((theirs == ours).sum()), total + len(ours)
    return same / total


def test_a_model_that_grows_keeps_four_of_five_tokens(subtests, tmp_path, capsys, tmp_path_factory):
    with subtests.test("four of five tokens stay"):
        source = tiny_checkpoint()
        settings = ["--extra-layers=3", "--extra-gain=2", "--seed=1"]
        assert run([str(tmp_path), f"--grown-from={source}", *settings]) == 0
        assert f"what {source} can draft for" in capsys.readouterr().out
        small, grown = (AutoModelForCausalLM.from_pretrained(path) for path in (source, tmp_path))
        assert grown.config.num_hidden_layers == small.config.num_hidden_layers + 3
        own, others = (AutoTokenizer.from_pretrained(path).get_vocab() for path in (source, tmp_path))
        assert own == others
        assert 0.7 < agreement(small, grown) < 0.95
    with subtests.test("what is no checkpoint does not grow"):
        tmp_path = tmp_path_factory.mktemp("case")
        (tmp_path / "source").mkdir()
        with pytest.raises(ConfigError, match="cannot grow"):
            run([str(tmp_path / "grown"), f"--grown-from={tmp_path / 'source'}"])
    with subtests.test("a family of other layers does not grow"):
        tmp_path = tmp_path_factory.mktemp("case")
        with pytest.raises(ConfigError, match="cannot grow"):
            run([str(tmp_path / "grown"), f"--grown-from={tiny_checkpoint('falcon_h1')}"])
