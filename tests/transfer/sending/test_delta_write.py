"""These tests show what goes out in one post."""

from services.kv.tails import tail_start, units_at
from services.transfer.sending.delta_write import DeltaWrite, Sources
from services.values.kv import GroupKind, GroupTarget, KvGroup, KvLayout, KvTicket, PageRun

PAGE, PROMPT_LEN = 16, 160
FULL = KvGroup(GroupKind.FULL_ATTENTION, (0,), 1, 1, "float32")
STATE = KvGroup(GroupKind.RECURRENT, (1,), 0, 0, "float32", unit_bytes=75)
WINDOW = KvGroup(GroupKind.SLIDING_WINDOW, (2,), 1, 1, "float32", window=145, unit_bytes=8)
LAYOUT = KvLayout(PAGE, 10, 1, groups=(FULL, STATE, WINDOW))


class Posts:
    """A transport, and a write that has landed at once: what each post has of each group."""

    def __init__(self):
        self.units = []

    def write(self, peer, moves):
        self.units.append([(move.group, move.num_pages) for move in moves])
        self.group_bytes = (0,) * len(LAYOUT.groups)
        return self

    def poll(self):
        return True

    def release(self):
        pass


def test_nothing_goes_out_with_a_unit_that_is_larger_than_a_post():
    num_units = [units_at(group, PROMPT_LEN, PAGE) for group in LAYOUT.carried]
    targets = tuple(
        GroupTarget(index, tail_start(group, PROMPT_LEN, PAGE), (PageRun(0, count),))
        for index, (group, count) in enumerate(zip(LAYOUT.carried, num_units, strict=True), 1)
    )
    ticket = KvTicket(1, 1, PROMPT_LEN, 0, (PageRun(0, 10),), 1e9, targets)
    write = DeltaWrite(ticket, LAYOUT, Sources(list(range(10)), tuple(range(count) for count in num_units)))
    posts = Posts()
    while write.can_post:
        write.post(posts, "peer", 64, 0.0)
        write.poll()
    # of 64 bytes: six pages; four, and three of the window; the state alone; six of the window
    assert posts.units == [[(0, 6)], [(0, 4), (2, 3)], [(1, 1)], [(2, 6)]]
    assert write.landed
