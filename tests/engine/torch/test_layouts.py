"""Layers keep what config.json says, as the engine finds it, family by family."""

import json

import pytest

from bench.families import FAMILIES
from exactness.checkpoints import tiny_checkpoint
from services.cli.model.make_model import ARCHITECTURES
from services.engine.torch.runner import TorchRunner
from services.model.layer_groups import layer_groups
from services.values.kv import GroupKind

PAGE = 16
_ALIGNMENT = 64  # bytes, of each of a slot's states
SAID_TOO_LITTLE = {"jamba"}  # of a Mamba-1 state config.json has no size, and the engine refuses it


QUICK = ("llama", "deepseek_v3", "falcon_h1", "gemma3", "gpt_oss", "qwen3_5")


def test_the_layout_is_what_config_json_says(subtests):
    for architecture in QUICK:
        with subtests.test(architecture):
            check_layout(architecture)


@pytest.mark.exact
@pytest.mark.parametrize("architecture", sorted({*ARCHITECTURES, *FAMILIES} - SAID_TOO_LITTLE - set(QUICK)))
def test_the_layout_of_every_family_is_what_config_json_says(architecture):
    check_layout(architecture)


def check_layout(architecture):
    directory = tiny_checkpoint(architecture)
    groups = layer_groups(json.loads((directory / "config.json").read_text()))
    runner = TorchRunner(directory, num_pages=4, page_size=PAGE, self_check=False)
    try:
        layout = runner.layout
    finally:
        runner.close()
    full, *carried = layout.groups
    said = groups.full.in_layout("float32", PAGE)
    assert (full.kind, full.layer_ids) == (said.kind, said.layer_ids)
    assert (full.num_kv_heads, full.head_dim, full.v_head_dim) == (
        said.num_kv_heads,
        said.head_dim,
        said.v_head_dim,
    )
    assert layout.page_bytes == said.unit_bytes
    windows = [group for group in carried if group.kind is not GroupKind.RECURRENT]
    assert windows == [window.in_layout("float32", PAGE) for window in groups.windows]
    slots = [group for group in carried if group.kind is GroupKind.RECURRENT]
    assert [slot.layer_ids for slot in slots] == [group.layer_ids for group in [groups.recurrent] if group]
    for slot in slots:
        spare = slot.unit_bytes - groups.recurrent.state_bytes("float32")
        assert 0 <= spare < 2 * len(slot.layer_ids) * _ALIGNMENT
