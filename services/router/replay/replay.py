"""One replay: requests, ranks, and the router's own placement."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from random import Random
from typing import Protocol

from services.router.ranks.rank_order import Share
from services.router.replay.events import Events
from services.router.replay.ours import Ours, Pins, SimulatedFleet
from services.router.replay.ranks import DecodeRank, PrefillRank, Rank
from services.router.replay.setting import Setting
from services.router.replay.workload import Job, TraceRequest
from services.values.kv import CacheEvents
from services.values.rank import Generation, Plan, RankId


class Policy(Protocol):
    """A policy is a router in the simulator."""

    def choose(self, request: TraceRequest) -> tuple[int, int | None]:
        """Return the index of the decode rank, and of the prefill rank, or None where decode computes."""

    def sent(self, job: Job) -> None: ...

    def first_token(self, job: Job) -> None: ...

    def ended(self, job: Job) -> None: ...

    def loaded(self, rank: Rank) -> None:
        """A rank has reported."""

    def told(self, rank: RankId, taken: CacheEvents) -> None:
        """A rank's cache events have come."""


_BELOW_S = 0.5  # in the mean until the next record of what lies below; there is one a second


class Replay:
    """It replays the requests with policy "ours", with "ours-remote" or "ours-local" by one plan alone, with
    "ours-held", which takes ranks to go on wherever they hold a prompt, or with "ours-alone" or
    "ours-remote-alone", under which no rank pulls from another."""

    def __init__(self, setting: Setting, policy: str, requests: Sequence[TraceRequest]) -> None:
        self._setting = setting
        self._requests = requests
        self._events = Events()
        events = self._events
        slow_decodes, slow_prefills = (0, 1) if setting.prefill else (1, 0)
        below = setting.states, setting.tier_blocks
        prefill_blocks = setting.prefill_blocks or setting.blocks
        self._decodes = [
            DecodeRank(RankId("d", i, Generation(1)), setting.blocks, timing, events, *below)
            for i, timing in enumerate(setting.timings(setting.decode, slow_decodes))
        ]
        self._prefills = [
            PrefillRank(RankId("p", i, Generation(1)), prefill_blocks, timing, events, *below)
            for i, timing in enumerate(setting.timings(setting.prefill, slow_prefills, of_prefill=True))
        ]
        self._followers: dict[int, list[tuple[Policy, TraceRequest]]] = {}
        self._waiting: dict[int, int] = {}  # for so many requests
        self._policies = self._make_policies(policy)
        for rank in self.ranks:
            rank.report = self._report
            rank.publish, rank.publish_below = self._publish, self._publish_below
        self.jobs: list[Job] = []

    @property
    def ranks(self) -> Sequence[Rank]:
        return (*self._prefills, *self._decodes)

    def serve(self) -> None:
        """Let every request be served."""
        for policy, requests in zip(self._policies, self._by_router(), strict=True):
            for request in requests:
                if request.after:
                    self._waiting[request.number] = len(request.after)
                    for number in request.after:
                        self._followers.setdefault(number, []).append((policy, request))
                else:
                    self._events.at(request.arrival_s, self._send, policy, request)
        self._events.run()
        for rank in self.ranks:
            assert rank.cache.num_open == 0, f"{rank.id} still holds pages"
        assert len(self.jobs) == len(self._requests)

    def _by_router(self) -> list[Sequence[TraceRequest]]:
        number, draw = len(self._policies), self._setting.draw
        if not draw:
            return [self._requests[index::number] for index in range(number)]
        random = Random(draw)
        routers = [random.randrange(number) for _ in self._requests]
        return [list(compress(self._requests, map(index.__eq__, routers))) for index in range(number)]

    def _make_policies(self, name: str) -> list[Policy]:
        setting = self._setting
        pins = Pins(self._events, setting.staleness_s)
        shares = [Share(i, setting.routers) for i in range(setting.routers)]
        fleet, tells, pulls = self._fleet(name), name != "ours-held", not name.endswith("-alone")
        return [Ours(fleet, self._events, share, pins, tells, pulls, setting.draw) for share in shares]

    def _fleet(self, name: str) -> SimulatedFleet:
        setting = self._setting
        plans = {Plan.REMOTE, Plan.LOCAL} if "-remote" not in name else {Plan.REMOTE}
        if not self._prefills or name.endswith("-local"):
            plans = {Plan.LOCAL}
        return SimulatedFleet(
            self._decodes, self._prefills, setting.timing, setting.weights, frozenset(plans)
        )

    def _will_return(self, at_s: float, rank: Rank) -> None:
        """The next request of a conversation is known now, and who may see what is to come learns it here."""

    def _send(self, policy: Policy, request: TraceRequest) -> None:
        decode, prefill = policy.choose(request)

        def first_token(job: Job) -> None:
            self._events.after(self._setting.timing.hop_s, policy.first_token, job)

        def ended(job: Job) -> None:
            self._events.after(self._setting.timing.hop_s, policy.ended, job)
            self._send_followers(job)

        job = Job(
            request,
            self._decodes[decode],
            None if prefill is None else self._prefills[prefill],
            first_token,
            ended,
        )
        self.jobs.append(job)
        policy.sent(job)
        self._tell_others(policy, request)
        self._events.after(self._setting.timing.hop_s, job.decode.submit, job)

    def _tell_others(self, policy: Policy, request: TraceRequest) -> None:
        """The decode rank passes on what one router has sent to the others."""
        if len(self._policies) == 1 or not isinstance(policy, Ours):
            return
        others = [other for other in self._policies if isinstance(other, Ours) and other is not policy]
        if (coming := policy.coming(request)) is not None:
            for other in others:
                self._events.after(2 * self._setting.timing.hop_s, other.expect, coming)

    def _send_followers(self, job: Job) -> None:
        for policy, request in self._followers.pop(job.request.number, ()):
            self._waiting[request.number] -= 1
            if not self._waiting[request.number]:
                at_s = self._events.now + request.wait_s
                self._will_return(at_s, job.decode)
                self._events.at(at_s, self._send, policy, replace(request, arrival_s=at_s))

    def _report(self, rank: Rank) -> None:
        for policy in self._policies:
            policy.loaded(rank)

    def _publish(self, rank: Rank, taken: CacheEvents) -> None:
        for policy in self._policies:
            self._events.after(self._setting.staleness_s, policy.told, rank.id, taken)

    def _publish_below(self, rank: Rank, taken: CacheEvents) -> None:
        for policy in self._policies:
            if isinstance(policy, Ours):  # The others know nothing of tiers.
                self._events.after(_BELOW_S + self._setting.staleness_s, policy.told_below, rank.id, taken)
