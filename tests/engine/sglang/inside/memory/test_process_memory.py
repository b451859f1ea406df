"""These tests show what SGLang lists of a process's memory, as our layout, with a draft and without."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from services.engine.sglang.inside.process_memory import (
    AttentionHeads,
    Buffers,
    Draft,
    HostAgent,
    Posted,
    ProcessMemory,
    StateComponent,
    TpPlace,
    check_drafts,
    read_item_bytes,
)
from services.kv.ticket import check_layouts
from services.values.errors import ProtocolError
from services.values.kv import GroupKind

PAGE, LAYERS, KV_HEADS, HEAD_DIM = 16, 3, 4, 8
ITEM = PAGE * KV_HEADS * HEAD_DIM * 2  # of one layer's keys, in bfloat16
DRAFT_HEADS, DRAFT_HEAD_DIM = 2, 32
DRAFT_ITEM = PAGE * DRAFT_HEADS * DRAFT_HEAD_DIM * 2
HEADS = AttentionHeads(KV_HEADS, HEAD_DIM, "bfloat16")


def share(heads, tp_size):
    """Of a process: SGLang gives each one head at least."""
    return max(1, heads // tp_size) / heads


def listed(tp_size=1, drafts=True):
    """kv_item_lens: keys of all layers, then values; then those of the draft's one layer."""
    own = [int(ITEM * share(KV_HEADS, tp_size))] * 2 * LAYERS
    return own + [int(DRAFT_ITEM * share(DRAFT_HEADS, tp_size))] * 2 * drafts


def memory(tp_size=1, drafts=True, fingerprint=5):
    own, of_draft = read_item_bytes(listed(tp_size, drafts), 2 * drafts)
    heads = AttentionHeads(DRAFT_HEADS, DRAFT_HEAD_DIM, "bfloat16")
    draft = Draft(Buffers(of_draft, heads), fingerprint) if drafts else None
    return ProcessMemory(PAGE, 99, tp_size, Buffers(own, HEADS), (), (), draft=draft)


def test_layouts_with_a_draft_and_without(subtests):
    for tp_size in [1, 2, 4, 8]:
        with subtests.test(tp_size=tp_size):
            layout = memory(tp_size).layout(7)
            assert (layout.page_bytes, layout.groups[0].layer_ids) == (2 * LAYERS * ITEM, (0, 1, 2))
            group = layout.draft.group
            assert (group.kind, group.unit_bytes) == (GroupKind.FULL_ATTENTION, 2 * DRAFT_ITEM)
            assert (group.num_kv_heads, group.head_dim, group.layer_ids) == (
                DRAFT_HEADS,
                DRAFT_HEAD_DIM,
                (0,),
            )
            assert replace(layout, tp_size=1) == memory().layout(7)
    # Its bytes used to count as the model's, and decode that speculated alone was refused.
    for tp_size in [1, 2]:
        with subtests.test(tp_size=tp_size):
            with_draft, without = memory(tp_size).layout(7), memory(drafts=False).layout(7)
            assert replace(with_draft, draft=None, tp_size=1) == without
            check_layouts(without, with_draft)
            check_drafts(prefill=without, decode=with_draft)
            check_drafts(prefill=with_draft, decode=with_draft)
    with subtests.test("layers that sglang names are the models alone"):
        # disaggregation/utils.py, build_kv_layer_ids: the draft's ids come behind.
        assert replace(memory(), layer_ids=(1, 5, 1, 5)).layout(7).groups[0].layer_ids == (0, 1)
    with subtests.test("a draft has to have a place and to be the same"):
        own = memory().layout(7)
        with pytest.raises(ProtocolError, match="prefill speculates and decode does not"):
            check_drafts(prefill=own, decode=replace(own, draft=None))
        with pytest.raises(ProtocolError, match="with different drafts"):
            check_drafts(prefill=own, decode=memory(fingerprint=6).layout(7))


def writes(prefill_tp, decode_tp):
    """Between processes as SGLang pairs them: each of the wider side with one of the other's."""
    wider = max(prefill_tp, decode_tp)
    pairs = {(rank * prefill_tp // wider, rank * decode_tp // wider) for rank in range(wider)}
    return [(TpPlace(here, prefill_tp), TpPlace(there, decode_tp)) for here, there in pairs]


def test_what_all_processes_write_is_a_page_of_the_model_and_one_of_the_draft(subtests):
    for prefill_tp, decode_tp in list(product([1, 2, 4], repeat=2)):
        for prefill_drafts, decode_drafts in [(0, 0), (0, 1), (1, 1)]:
            with subtests.test(
                prefill_tp=prefill_tp,
                decode_tp=decode_tp,
                prefill_drafts=prefill_drafts,
                decode_drafts=decode_drafts,
            ):
                writer, there = (
                    memory(prefill_tp, bool(prefill_drafts)),
                    listed(decode_tp, bool(decode_drafts)),
                )
                written = [writer.written_bytes(there, *places) for places in writes(prefill_tp, decode_tp)]
                assert sum(of_model for of_model, _ in written) == 2 * LAYERS * ITEM
                assert sum(of_draft for _, of_draft in written) == (2 * DRAFT_ITEM if prefill_drafts else 0)


def test_a_latent_is_whole_in_every_process():
    buffers = Buffers((640,) * LAYERS, HEADS, is_latent=True)
    latent = ProcessMemory(PAGE, 99, 4, buffers, (), (), draft=Draft(Buffers((640,), HEADS, True), 5))
    layout = latent.layout(7)
    assert (layout.page_bytes, layout.draft.group.unit_bytes) == (3 * 640, 640)
    assert (len(layout.groups[0].layer_ids), layout.draft.group.layer_ids) == (3, (0,))
    writes = [latent.written_bytes([640] * 4, TpPlace(rank, 4), TpPlace(rank, 4)) for rank in range(4)]
    assert writes == [(3 * 640, 640), (0, 0), (0, 0), (0, 0)]


WINDOW_ITEM, CONVOLUTION, STATE = ITEM // 2, 96, 1024


def carrying(tp_size=1, replicated=False):
    """Two windowed layers, a kind that is part of each page, and two recurrent layers. `replicated`: every
    process holds all of a convolution."""
    window = StateComponent("swa", (int(WINDOW_ITEM * share(KV_HEADS, tp_size)),) * 4)
    convolution = CONVOLUTION if replicated else CONVOLUTION // tp_size
    sizes = (convolution, convolution, STATE // tp_size, STATE // tp_size)
    state = StateComponent("mamba", sizes, (0, 1, 0, 1), (0 if replicated else 8,) * 2 + (8, 8))
    components = (window, StateComponent("dsa", (64,)), state)
    return replace(memory(tp_size, drafts=False), components=components, window_size=31)


def item_bytes(own):
    return [component.item_bytes for component in own.components]


def test_tails_and_states_that_are_written(subtests):
    for prefill_tp, decode_tp, replicated in [
        *((*sizes, False) for sizes in product([1, 2, 4, 8], repeat=2)),
        *((size, size, True) for size in (1, 2, 4, 8)),  # SGLang refuses other pairs
    ]:
        with subtests.test(prefill_tp=prefill_tp, decode_tp=decode_tp, replicated=replicated):
            writer, reader = carrying(prefill_tp, replicated), carrying(decode_tp, replicated)
            written = Counter()
            for places in writes(prefill_tp, decode_tp):
                for kind, size_bytes in writer.written_states(
                    [[4, 5], [9], [7]], item_bytes(reader), *places
                ):
                    written[kind] += size_bytes
            window, state = reader.layout(7).carried
            assert (window.unit_bytes, state.unit_bytes) == (4 * WINDOW_ITEM, 2 * (CONVOLUTION + STATE))
            assert written == {"swa": 2 * window.unit_bytes, "mamba": state.unit_bytes}
    # nixl/conn.py, maybe_send_extra.
    for indices in [[None, [9], [7]], [[4, 5]], [[4, 5], [9], None], []]:
        with subtests.test(indices=indices):
            own, place = carrying(), TpPlace(0, 1)
            sizes = {"swa": 2 * 4 * WINDOW_ITEM, "mamba": 2 * (CONVOLUTION + STATE)}
            given = dict(zip(["swa", "dsa", "mamba"], indices, strict=False))
            written = dict(own.written_states(indices, item_bytes(own), place, place))
            assert written == {kind: sizes[kind] for kind in sizes if given.get(kind)}


def test_pages_tails_and_states_are_counted_apart():
    posted = Posted()
    posted.pages(3, 100)
    posted.pages(2, 100)
    posted.carried("swa", 40)
    posted.carried("mamba", 7)
    posted.carried("swa", 40)  # to another process of the peer's
    assert (posted.num_pages, posted.size_bytes) == (5, 500)
    assert posted.carried_bytes == {"swa": 80, "mamba": 7}


class Agent:
    """NIXL's, which notes what it is told."""

    name = "a"

    def __init__(self):
        self.told = []

    def register_memory(self, memory, kind):
        self.told.append((memory, kind))
        return "registered"

    def get_xfer_descs(self, rows, kind):
        self.told.append((rows, kind))

    def prep_xfer_dlist(self, peer, rows, kind):
        self.told.append((peer, rows, kind))


def test_on_a_cpu_all_memory_is_the_hosts():
    agent = Agent()
    host = HostAgent(agent)
    assert host.register_memory([1], "VRAM") == "registered"
    host.get_xfer_descs([2], "VRAM")
    host.prep_xfer_dlist("VRAMs", [3], "DRAM")
    assert agent.told == [([1], "DRAM"), ([2], "DRAM"), ("VRAMs", [3], "DRAM")]
    assert host.name == "a"
