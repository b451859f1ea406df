"""These tests show how blocks and checkpoints lie in slots."""

from hypothesis import given
from hypothesis import strategies as st

from services.kv.tails import carried_bytes, units_at
from services.kv.tiers.slot_spans import block_spans, most_parts, num_parts, part_spans, slot_bytes
from services.values.kv import DraftKv, GroupKind, KvGroup, KvLayout

PAGE, BLOCK = 4, 8


def group(kind, unit_bytes, window=0):
    return KvGroup(kind, (1,), 1, 1, "float32", window=window, unit_bytes=unit_bytes)


def layout_of(carried, draft_bytes=0):
    full = group(GroupKind.FULL_ATTENTION, 0)
    draft = DraftKv(7, group(GroupKind.FULL_ATTENTION, draft_bytes)) if draft_bytes else None
    return KvLayout(PAGE, 96, 1, groups=(full, *carried), draft=draft)


groups = st.builds(
    group,
    st.sampled_from([GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_WINDOW, GroupKind.RECURRENT]),
    st.integers(1, 500),
    st.integers(1, 40),
)


@given(st.lists(groups, min_size=1, max_size=3), st.integers(1, 12))
def test_each_byte_of_a_checkpoint_lies_in_one_place_of_its_parts(carried, num_blocks):
    layout, position = layout_of(carried), num_blocks * BLOCK
    units = [tuple(range(units_at(each, position, PAGE))) for each in carried]
    size = slot_bytes(layout, BLOCK)
    parts = part_spans(layout, units, size)
    due = {(pool, unit) for pool, of_group in enumerate(units, start=1) for unit in of_group}
    bytes_of = {each: 0 for each in due}
    for part in parts:
        at = 0
        for span in part:
            assert span.at == at and span.start == bytes_of[span.pool, span.unit], "bytes are in order"
            bytes_of[span.pool, span.unit] += span.num_bytes
            at += span.num_bytes
        assert at <= size
    assert bytes_of == {(pool, unit): layout.unit_bytes[pool] for pool, unit in due}
    count = num_parts(layout, position, size)
    assert len(parts) == count == max(1, -(-carried_bytes(layout, position) // size))
    assert all(parts) or count == 1, "a part is empty"
    assert count <= most_parts(layout, size)


def test_a_blocks_pages_come_first_and_then_the_draft_models():
    layout = layout_of([], draft_bytes=10)
    assert slot_bytes(layout, BLOCK) == 2 * (96 + 10)
    spans = block_spans(layout, BLOCK, [5], first=1)
    assert spans == ((96, 0, 5, 0, 96), (192 + 10, 1, 5, 0, 10))
