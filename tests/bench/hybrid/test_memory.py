"""Both sides have the same memory, and states take theirs of it."""

import pytest

from bench.hybrid.memory import Memory, Shape
from bench.hybrid.models import fake_hybrid, fake_windowed
from services.values.kv import GroupKind

pytestmark = pytest.mark.long


PAGE_SIZE = 64
SHAPE = Shape(context=8192, own=288, groups_at_once=4, concurrency=24)
HELD = 7


def memory_of(model):
    return Memory(model.group, model.token_bytes, PAGE_SIZE, chunk_size=512)


def tokens(memory, division, units):
    """What a division takes, with so many units of what is carried."""
    return division.num_pages * PAGE_SIZE + units * memory.group.unit_bytes / memory.token_bytes


def test_both_sides_have_the_same_memory(subtests):
    for model in [fake_hybrid(100), fake_hybrid(3168), fake_windowed(128, PAGE_SIZE)]:
        with subtests.test("no side has more than the memory", model=model):
            memory = memory_of(model)
            total = memory.total_tokens(SHAPE, HELD)
            shared, unshared = memory.shared(SHAPE, HELD), memory.unshared(SHAPE, HELD)
            units = shared.num_slots or shared.num_window_pages
            assert total - 2 * PAGE_SIZE < tokens(memory, shared, units) <= total
            # The pools that it is not charged for are there all the same: whoever finds pages may run.
            assert unshared.num_pages * PAGE_SIZE + HELD * memory.carried_tokens == total
            assert unshared.running == SHAPE.concurrency
    with subtests.test("what a request carries"):
        assert memory_of(fake_hybrid(450)).carried_tokens == 450
        assert memory_of(fake_hybrid(450)).set_aside(2) == 900
        # Of a window of 128 three pages a request, and for chunks of 512 eight at once.
        assert memory_of(fake_windowed(128, PAGE_SIZE)).set_aside(2) == (2 * 3 + 8) * PAGE_SIZE
        assert memory_of(fake_windowed(128, PAGE_SIZE)).carried_tokens == 192
    with subtests.test("fewer run the more a state weighs"):
        running = [
            memory_of(fake_hybrid(state)).shared(SHAPE, HELD).running
            for state in (1, 450, 1584, 3168, 100_000)
        ]
        assert running[0] == SHAPE.concurrency and running[-1] >= 1
        assert running == sorted(running, reverse=True) and running[0] > running[3]
    with subtests.test("each kind has its own pool"):
        assert memory_of(fake_hybrid(100)).shared(SHAPE, HELD).num_window_pages is None
        assert memory_of(fake_windowed(128, PAGE_SIZE)).shared(SHAPE, HELD).num_slots is None
        assert fake_windowed(128, PAGE_SIZE).group.kind is GroupKind.SLIDING_WINDOW
