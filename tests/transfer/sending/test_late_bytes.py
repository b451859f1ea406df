"""Bytes that land late land on units that are still kept for them, whatever happens before.

A prefill rank's transfers and the watches of a decode rank that lends few units again and again, over a
network that lands, loses and delays them as it likes: pages of full attention alone, or of a window too, and
states. What it promises: what lands does so within LONGEST_S of its post, and within MARGIN_S once its write
is seen to have failed.
"""

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.kv.tails import units_at
from services.kv.ticket import targets_of
from services.transfer.receiving.transfer_watch import Landed, TransferWatch
from services.transfer.sending.receivers import TransportBroken
from services.transfer.transport import Unsettled
from services.values.errors import PeerFailed
from services.values.kv import PageId
from services.values.rank import RankAddress, TransferId
from services.wire.isthmus.v1 import handshake_pb2 as pb
from transfer.sending.sending_rank import HYBRID, LAYOUT, OWN, PAGE, FakeTransport, FakeWrite, Rank

POOL_UNITS = (5, 4, 2)  # by group
LEASE_S = 10.0
MARGIN_S = 5.0
LONGEST_S = 330.0


Unit = tuple[int, PageId]  # with its group


@dataclass(eq=False)
class NetworkWrite(FakeWrite):
    """Its units land one by one."""

    transfer_id: TransferId | None = None
    to_land: list[Unit] = field(default_factory=list)
    clock: object = None
    posted_s: float = 0.0
    over_s: float | None = None  # when its failure was seen

    def release(self):
        super().release()
        self.over_s = self.clock()

    @property
    def may_land(self):
        lost = self.failure and not self.unsettled
        in_time = self.over_s is None or self.clock() < self.over_s + MARGIN_S
        in_time &= self.clock() < self.posted_s + LONGEST_S
        return bool(self.to_land) and not self.done and not lost and in_time


@dataclass
class Network(FakeTransport):
    """What fails at its post is on its way too."""

    clock: object = None
    on_the_way: list[NetworkWrite] = field(default_factory=list)
    transfer_of: dict[Unit, TransferId] = field(default_factory=dict)

    def write(self, peer, moves):
        units = [(m.group, PageId(m.target_page + i)) for m in moves for i in range(m.num_pages)]
        transfer_id = self.transfer_of[units[0]]
        write = NetworkWrite(
            list(moves), peer, self.unit_bytes, transfer_id=transfer_id, to_land=units, clock=self.clock
        )
        write.posted_s = self.clock()
        self.on_the_way.append(write)
        if self.fails_posts is not None:
            write.failure, write.unsettled = "refused", self.fails_posts is Unsettled
            write.release()
        super().write(peer, moves)  # raises where it must
        self.writes[-1] = write
        return write


@dataclass
class Transfer:
    """As a decode rank sees it."""

    transfer_id: TransferId
    units: list[Unit]
    watch: TransferWatch
    quarantined: bool = False


class DecodeEnd:
    """The stream to the writer, which hears at once; a rank that is told later."""

    def __init__(self, rank):
        self._rank = rank

    def send_renewal(self, transfer_id, write_until_s):
        self._rank.transfers.renew(1, transfer_id, write_until_s)

    def send_abort(self, transfer_id):
        self._rank.transfers.abort(1, transfer_id)

    def lease_end_s(self, write_until_s):
        return write_until_s


class TwoRanks(RuleBasedStateMachine):
    layout = LAYOUT

    def __init__(self):
        super().__init__()
        self.words = deque()
        self.network = Network(unit_bytes=self.layout.unit_bytes, clock=self.clock)
        # One page a post, or three of the window's, or a state.
        self.rank = Rank(max_post_bytes=100, network=self.network, layout=self.layout)
        self.rank.hear = lambda link_id: self.words.append
        self.rank.link_up(1)
        counts = POOL_UNITS[: len(self.layout.unit_bytes)]
        self.free = [[PageId(unit) for unit in range(count)] for count in counts]
        self.transfers, self.linked = {}, {}  # linked: those that have not heard their last word
        self.holds = {}  # unit -> what landed there last
        self.last_transfer = 0

    def clock(self):
        return self.rank.now_s

    def writes(self, wanted):
        return [write for write in self.network.on_the_way if wanted(write)]

    # -- what the decode rank does ------------------------------------------------------------------------

    @precondition(lambda self: all(self.free))
    @rule(num_pages=st.integers(1, 3))
    def ask(self, num_pages):
        num_pages = min(num_pages, len(self.free[0]))
        tokens = PAGE * num_pages
        counts = [num_pages, *(units_at(group, tokens, PAGE) for group in self.layout.carried)]
        if any(count > len(free) for count, free in zip(counts, self.free, strict=True)):
            return
        pages, *carried = by_group = [
            [free.pop(0) for _ in range(count)] for count, free in zip(counts, self.free, strict=True)
        ]
        units = [(group, unit) for group, lent in enumerate(by_group) for unit in lent]
        self.last_transfer += 1
        transfer_id, until_s = TransferId(self.last_transfer), self.clock() + LEASE_S
        for unit in units:
            self.network.transfer_of[unit] = transfer_id
        end = DecodeEnd(self.rank)
        watch = TransferWatch(transfer_id, RankAddress(OWN, ""), end, until_s, self.clock, lambda watch: None)
        self.transfers[transfer_id] = self.linked[transfer_id] = Transfer(transfer_id, units, watch)
        targets = targets_of(self.layout, tokens, carried)
        self.rank.ticket(transfer_id, tokens, until_s=until_s, pages=pages, targets=targets)
        self.rank.request(transfer_id, tokens)
        self.rank.pages(0, tokens, transfer_id)
        if carried:
            self.rank.carried(tokens, transfer_id)

    @precondition(lambda self: self.transfers)
    @rule(data=st.data())
    def cancel(self, data):
        self.give_up(data.draw(st.sampled_from(list(self.transfers.values()))))

    @precondition(lambda self: self.transfers)
    @rule(data=st.data())
    def renew(self, data):
        data.draw(st.sampled_from(list(self.transfers.values()))).watch.renew(self.clock() + LEASE_S)

    @precondition(lambda self: self.words)
    @rule()
    def hear(self):
        message = self.words.popleft()
        kind = message.WhichOneof("message")
        word = getattr(message, kind)
        if kind == "status" and word.state == pb.Status.STATE_ACCEPTED:
            return
        transfer = self.linked.pop(word.room, None)  # the last word on it, as for a link
        if transfer is None:
            return
        if kind == "status" and word.state == pb.Status.STATE_LANDED:
            group_bytes = tuple(word.group_bytes) or (word.bytes_moved,)
            transfer.watch.on_landed(Landed(group_bytes, word.descriptors))
            assert all(self.holds[unit] == transfer.transfer_id for unit in transfer.units)
        else:
            ended = transfer.watch.on_unsettled if word.unsettled else transfer.watch.on_last_word
            ended("it failed")
        self.give_up(transfer)  # or has used it, which is the same to the units

    def give_up(self, transfer):
        if not transfer.quarantined:
            transfer.quarantined = True
            transfer.watch.abort()

    # -- what the prefill rank does -----------------------------------------------------------------------

    @rule()
    def turn(self):
        # Raised last, where only a new life of the rank helps; its transfers must be right all the same.
        with suppress(TransportBroken):
            self.rank.transfers.turn()
        for transfer_id, _ in self.rank.failed:  # the Prefill call is answered
            if transfer_id in self.transfers:
                self.give_up(self.transfers[transfer_id])
        self.rank.failed.clear()

    # -- what the network does ----------------------------------------------------------------------------

    @precondition(lambda self: self.writes(lambda write: write.may_land))
    @rule(data=st.data())
    def land_a_unit(self, data):
        write = data.draw(st.sampled_from(self.writes(lambda write: write.may_land)))
        unit = write.to_land.pop(0)
        assert write.transfer_id in self.transfers and unit in self.transfers[write.transfer_id].units, (
            f"unit {unit} is not kept for transfer {write.transfer_id} any more"
        )
        assert write.transfer_id not in [transfer_id for transfer_id, _ in self.rank.ends], (
            "the source unit is used again"
        )
        self.holds[unit] = write.transfer_id
        if not write.failure and not write.to_land:
            write.done = True

    @precondition(lambda self: self.writes(lambda write: not write.failure and not write.done))
    @rule(data=st.data(), unsettled=st.booleans())
    def fail(self, data, unsettled):
        under_way = self.writes(lambda write: not write.failure and not write.done)
        write = data.draw(st.sampled_from(under_way))
        write.failure, write.unsettled = "cut", unsettled

    @rule(error=st.sampled_from([None, PeerFailed, Unsettled]))
    def break_or_mend_posts(self, error):
        self.network.fails_posts = error

    @rule(seconds=st.sampled_from([0.1, 2.0, 4.9, 12.0, 31.0, 299.0]))
    def wait(self, seconds):
        self.rank.now_s += seconds

    # ---------------------------------------------------------------------------------------------------

    @invariant()
    def units_come_back(self):
        for transfer in list(self.transfers.values()):
            if transfer.quarantined and transfer.watch.is_over(MARGIN_S):
                del self.transfers[transfer.transfer_id]
                for group, unit in transfer.units:
                    self.free[group].append(unit)
        kept = [unit for transfer in self.transfers.values() for unit in transfer.units]
        free = [(group, unit) for group, units in enumerate(self.free) for unit in units]
        assert sorted(kept + free) == self.every_unit()

    def every_unit(self):
        groups = range(len(self.free))
        return [(group, unit) for group in groups for unit in range(POOL_UNITS[group])]

    def teardown(self):
        """In the end everything is back on both sides."""
        for write in self.writes(lambda write: not write.failure):
            write.done = True
        self.network.fails_posts = None
        for transfer in self.transfers.values():
            self.give_up(transfer)
        for _ in range(4):
            with suppress(TransportBroken):
                self.rank.turn()
            while self.words:
                self.hear()
            self.rank.now_s += LEASE_S + MARGIN_S
            self.units_come_back()
        assert sum(map(len, self.free)) == len(self.every_unit())
        assert sorted(transfer_id for transfer_id, _ in self.rank.ends) == list(
            range(1, self.last_transfer + 1)
        )
        assert self.rank.transfers.open_transfers == 0


TwoRanks.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLateBytes = TwoRanks.TestCase


class TwoHybrids(TwoRanks):
    layout = HYBRID


TwoHybrids.TestCase.settings = TwoRanks.TestCase.settings
TestLateBytesOfHybrids = TwoHybrids.TestCase
