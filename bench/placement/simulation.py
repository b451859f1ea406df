"""One run: a workload, a layout, a policy."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

from bench.placement.events import Events
from bench.placement.ours import Fleet, Oracle, Ours, Outlook
from bench.placement.peers import PEERS, Peer, Rule, Rules
from bench.placement.pins import Pins
from bench.placement.policies import (
    CacheAware,
    Everywhere,
    LeastLoaded,
    Picker,
    Policy,
    PrefixHash,
    RoundRobin,
    Separate,
    StickySession,
)
from bench.placement.ranks import DecodeRank, Job, PrefillRank, Rank
from bench.placement.settings import Setting
from bench.placement.workload import TraceRequest
from bench.report import Row
from services.router.ranks.rank_order import Share
from services.values.kv import CacheEvents
from services.values.rank import Generation, Plan, RankId

OURS = ("ours", "ours-remote", "ours-held", "oracle")
OTHERS = ("round-robin", "least-loaded", "sticky", "prefix-hash", "cache-aware")
POLICIES = OURS + OTHERS  # of a trace
ONE_PLAN = ("ours-remote", "ours-local", "oracle-remote")  # where there are prefill ranks
_BELOW_S = 0.5  # in the mean until the next record of what lies below; there is one a second
READ_INDEX = ("ours", "ours-remote", "ours-held")  # and pins


class Simulation:
    def __init__(self, setting: Setting, policy: str, requests: Sequence[TraceRequest]) -> None:
        self._setting = setting
        self._requests = requests
        self._events = Events()
        events = self._events
        slow_decodes, slow_prefills = (0, 1) if setting.prefill else (1, 0)
        below = setting.states, setting.tier_blocks
        self._decodes = [
            DecodeRank(RankId("d", i, Generation(1)), setting.blocks, timing, events, *below)
            for i, timing in enumerate(setting.timings(setting.decode, slow_decodes))
        ]
        self._prefills = [
            PrefillRank(RankId("p", i, Generation(1)), setting.blocks, timing, events, *below)
            for i, timing in enumerate(setting.timings(setting.prefill, slow_prefills))
        ]
        self._followers: dict[int, list[tuple[Policy, TraceRequest]]] = {}
        self._waiting: dict[int, int] = {}  # for so many requests
        self._outlook = Outlook(self._events.clock)
        self._policies = self._make_policies(policy)
        for rank in self.ranks:
            rank.report = self._report
            rank.publish, rank.publish_below = self._publish, self._publish_below
        self.jobs: list[Job] = []

    @property
    def ranks(self) -> Sequence[Rank]:
        return (*self._prefills, *self._decodes)

    def run(self) -> Row:
        began = time.process_time()
        self.serve()
        return self._row(time.process_time() - began)

    def serve(self) -> None:
        """Let every request be served."""
        for index, policy in enumerate(self._policies):
            for request in self._requests[index :: len(self._policies)]:
                if request.after:
                    self._waiting[request.number] = len(request.after)
                    for number in request.after:
                        self._followers.setdefault(number, []).append((policy, request))
                else:
                    self._events.at(request.arrival_s, self._send, policy, request)
        self._events.run()
        for rank in self.ranks:
            rank.cache.check()
            assert rank.cache.num_open == 0, f"{rank.id} still holds pages"
        assert len(self.jobs) == len(self._requests)

    def _make_policies(self, name: str) -> list[Policy]:
        setting = self._setting
        plans = {Plan.REMOTE, Plan.LOCAL} if not name.endswith("-remote") else {Plan.REMOTE}
        if not self._prefills or name.endswith("-local"):
            plans = {Plan.LOCAL}
        fleet = Fleet(self._decodes, self._prefills, setting.timing, setting.weights, frozenset(plans))
        if name.partition("-")[0] == "oracle":
            return [Oracle(fleet, i, self._outlook) for i in range(setting.routers)]
        if name.partition("-")[0] == "ours":
            pins = Pins(self._events, setting.staleness_s)
            shares = [Share(i, setting.routers) for i in range(setting.routers)]
            tells = name != "ours-held"
            return [Ours(fleet, self._events, share, pins, tells) for share in shares]
        if name == "everywhere":
            if self._prefills:
                raise ValueError("'everywhere' needs a layout without prefill ranks")
            return [Everywhere(self._decodes)]
        if name in PEERS:
            rules, is_local = PEERS[name]
            rule, clock = partial(_rule, rules, setting.blocks), self._events.clock
            return [
                Peer(self._decodes, self._prefills, rule, is_local, clock) for _ in range(setting.routers)
            ]
        return [
            Separate(
                self._decodes,
                self._prefills,
                _picker(name, setting.decode),
                _picker(name, setting.prefill),
            )
            for _ in range(setting.routers)
        ]

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
        self._events.after(self._setting.timing.hop_s, job.decode.submit, job)

    def _send_followers(self, job: Job) -> None:
        for policy, request in self._followers.pop(job.request.number, ()):
            self._waiting[request.number] -= 1
            if not self._waiting[request.number]:
                at_s = self._events.now + request.wait_s
                self._outlook.will_return(at_s, job.decode)
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

    def _row(self, cpu_s: float) -> Row:
        jobs, setting = self.jobs, self._setting
        remote = [job for job in jobs if job.prefill is not None]
        prompt_tokens = sum(job.request.prompt_tokens for job in jobs)
        blocks = sum(len(job.request.blocks) for job in jobs)
        remote_blocks = sum(len(job.request.blocks) for job in remote)
        ttft = sorted(job.first_token_s - job.request.arrival_s for job in jobs)
        moved = sum(job.delta_tokens for job in remote) * setting.timing.kv_bytes_per_token
        moved += len(remote) * setting.timing.state_bytes
        busy = [rank.busy_s for rank in self.ranks if rank.busy_s > 0]
        itl = [
            (job.ended_s - job.first_token_s) / (job.request.output_tokens - 1)
            for job in jobs
            if job.request.output_tokens > 1
        ]
        return {
            "prefill_hit": sum(job.resumed_blocks for job in remote) / remote_blocks if remote else 0.0,
            "decode_hit": sum(job.decode_blocks for job in jobs) / blocks,
            "computed_ratio": sum(job.computed_tokens for job in jobs) / prompt_tokens,
            "moved_gb": moved / 1e9,
            "local_share": 1 - len(remote) / len(jobs),
            "ttft_mean_s": fmean(ttft),
            "ttft_p50_s": _quantile(ttft, 0.5),
            "ttft_p99_s": _quantile(ttft, 0.99),
            "itl_mean_s": fmean(itl),
            "imbalance": max(busy) / fmean(busy),
            "cpu_s": cpu_s,
        }


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _rule(rules: Rules, blocks: int, num_ranks: int) -> Rule:
    return rules(num_ranks, blocks)


def _picker(name: str, num_ranks: int) -> Picker:
    match name:
        case "round-robin":
            return RoundRobin()
        case "least-loaded":
            return LeastLoaded()
        case "sticky":
            return StickySession()
        case "prefix-hash":
            return PrefixHash()
        case "cache-aware":
            return CacheAware(num_ranks)
    raise ValueError(f"no policy {name!r}; there are {', '.join(POLICIES)}")
