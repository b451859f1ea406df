"""SGLang's states as groups of our layout, whatever the parallelism."""

import pytest

from services.engine.sglang.inside.process_memory import AttentionHeads, StateComponent, carried_groups
from services.kv.tails import tail_start, units_at
from services.kv.ticket import check_layouts
from services.values.errors import ProtocolError
from services.values.kv import GroupKind, KvGroup, KvLayout

PAGE = 16
HEADS = AttentionHeads(num_kv_heads=4, head_dim=8, dtype="bfloat16")
K_PAGE = PAGE * 4 * 8 * 2  # bytes of one layer's keys
# The state of 3 layers, whole: a convolution and a recurrent part each, as SGLang lists them.
CONVOLUTION, STATE = 96, 1024


def windows(tp_size=1, layers=2):
    heads = max(1, HEADS.num_kv_heads // tp_size)
    return StateComponent("swa", (K_PAGE * heads // HEADS.num_kv_heads,) * 2 * layers)


def states(tp_size=1, sliced=1):
    sizes = (CONVOLUTION // tp_size,) * 3 + (STATE // tp_size if sliced else STATE,) * 3
    return StateComponent("mamba", sizes, (0, 1, 3, 0, 1, 3), (8, 8, 8, sliced, sliced, sliced))


def groups_of(*components, tp_size=1):
    return carried_groups(components, HEADS, tp_size, window_size=31)


def layout(*components, tp_size=1):
    full = KvGroup(GroupKind.FULL_ATTENTION, (0, 1), 4, 8, "bfloat16")
    return KvLayout(PAGE, 4 * K_PAGE, 7, tp_size, (full, *groups_of(*components, tp_size=tp_size)))


def test_groups_of_windows_and_states(subtests):
    with subtests.test("a window is pages and a state a slot"):
        window, state = groups_of(windows(), states())
        assert (window.kind, window.unit_bytes) == (GroupKind.SLIDING_WINDOW, 2 * 2 * K_PAGE)
        assert (window.num_kv_heads, window.head_dim, window.layer_ids) == (4, 8, (0, 1))
        assert (state.kind, state.unit_bytes) == (GroupKind.RECURRENT, 3 * (CONVOLUTION + STATE))
        assert (state.num_kv_heads, state.layer_ids) == (0, (0, 1, 3))
    with subtests.test("what every process holds whole counts once"):
        (state,) = groups_of(states(2, sliced=0), tp_size=2)
        assert state.unit_bytes == 3 * (CONVOLUTION + STATE)
    with subtests.test("what is part of each page is no group"):
        assert groups_of(StateComponent("dsa", (64,))) == ()


def test_a_tail_is_what_sglang_sends(subtests):
    """disaggregation/decode.py, _swa_payload: pages of [page_floor(len - window_size), len)."""
    for prompt_len in [1, 15, 31, 32, 33, 100, 160, 460, 463]:
        with subtests.test(prompt_len=prompt_len):
            (window,) = groups_of(windows())
            first = max(0, prompt_len - 31) // PAGE * PAGE
            assert tail_start(window, prompt_len, PAGE) == first
            assert units_at(window, prompt_len, PAGE) == -(-prompt_len // PAGE) - first // PAGE


def test_which_sides_pair(subtests):
    for tp_size in [2, 4, 8]:
        with subtests.test(tp_size=tp_size):
            own, peer = (
                layout(windows(), states()),
                layout(windows(tp_size), states(tp_size), tp_size=tp_size),
            )
            check_layouts(own, peer)
    for name, peer in zip(
        ["none", "no state", "one more", "another order", "another size"],
        [
            (),
            (windows(),),
            (windows(), states(), states()),
            (states(), windows()),
            (windows(layers=3), states()),
        ],
        strict=True,
    ):
        with subtests.test(name), pytest.raises(ProtocolError, match="differ in groups"):
            check_layouts(layout(windows(), states()), layout(*peer))
