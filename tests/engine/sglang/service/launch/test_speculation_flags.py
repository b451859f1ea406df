"""These tests show what a draft's checkpoint says of it."""

import json
import shutil

import pytest

from services.engine.sglang.service.speculation_flags import ALGORITHM, DraftShape
from services.values.errors import ConfigError

EAGLE3 = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "draft_vocab_size": 32000}


def values(path):
    return {ALGORITHM: "EAGLE3", "--speculative-draft-model-path": str(path)}


def draft(path, config, **weights):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    for name, content in weights.items():
        (path / name.replace("_", ".")).write_bytes(content)
    return path


def test_shapes_of_drafts(subtests, tmp_path):
    for config, expected in [
        (EAGLE3, (8, 128, False)),
        ({**EAGLE3, "head_dim": 64}, (8, 64, False)),
        ({"num_attention_heads": 4, "hidden_size": 64}, (4, 16, False)),
        ({"text_config": EAGLE3}, (8, 128, False)),
        ({**EAGLE3, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, (1, 576, True)),
    ]:
        with subtests.test(config=config, expected=expected):
            shape = DraftShape.read(values(draft(tmp_path, config)))
            assert (shape.num_kv_heads, shape.head_dim, shape.is_latent) == expected
    with subtests.test("a layer of the models checkpoint has none"):
        assert DraftShape.read({ALGORITHM: "NEXTN"}) is None
        assert DraftShape.read({}) is None
    for config in [
        {},
        {"num_attention_heads": 4},
        [],
        {**EAGLE3, "hidden_size": None},
        {"num_attention_heads": 0, "hidden_size": 64},
    ]:
        with subtests.test(config=config), pytest.raises(ConfigError, match="says too little"):
            DraftShape.read(values(draft(tmp_path, config)))
    with (
        subtests.test("one that is no directory is refused"),
        pytest.raises(ConfigError, match="must be a checkpoint directory"),
    ):
        DraftShape.read(values("a-hub/model"))


def test_copies_are_one_draft_and_others_are_not(tmp_path):
    first = draft(tmp_path / "a", EAGLE3, model_bin=b"1" * 9000)
    shutil.copytree(first, tmp_path / "b")
    names = [first, tmp_path / "b", draft(tmp_path / "c", EAGLE3, model_bin=b"1" * 8999 + b"2")]
    names.append(draft(tmp_path / "d", {**EAGLE3, "rope_theta": 1}, model_bin=b"1" * 9000))
    prints = [DraftShape.read(values(path)).fingerprint() for path in names]
    assert prints[0] == prints[1] and len(set(prints)) == 3
