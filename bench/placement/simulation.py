"""One run: a workload, a layout, a policy."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

from bench.placement.oracle import Oracle, Outlook
from bench.placement.peers import PEERS, Peer, Rule, Rules
from bench.placement.policies import (
    CacheAware,
    Everywhere,
    LeastLoaded,
    Picker,
    RoundRobin,
    Separate,
    StickySession,
)
from bench.report import Row
from services.router.replay.planner import quantile
from services.router.replay.ranks import Rank
from services.router.replay.replay import Policy, Replay
from services.router.replay.setting import Setting
from services.router.replay.workload import TraceRequest

OURS = ("ours", "ours-remote", "ours-alone", "oracle")
OTHERS = ("round-robin", "least-loaded", "sticky", "cache-aware")
POLICIES = OURS + OTHERS  # of a trace
ONE_PLAN = ("ours-remote", "ours-local", "oracle-remote")  # where there are prefill ranks


class Simulation(Replay):
    """A replay that knows other policies, too. `others_shorter_first` is what their ranks do."""

    def __init__(
        self,
        setting: Setting,
        policy: str,
        requests: Sequence[TraceRequest],
        others_shorter_first: float = 0.0,
    ) -> None:
        self._outlook = Outlook(lambda: self._events.now)
        if policy in OTHERS or policy in PEERS:
            timing = replace(setting.timing, shorter_first=others_shorter_first)
            setting = replace(setting, timing=timing)
        super().__init__(setting, policy, requests)

    def run(self) -> Row:
        began = time.process_time()
        self.serve()
        return self._row(time.process_time() - began)

    def serve(self) -> None:
        super().serve()
        for rank in self.ranks:
            rank.cache.check()

    def _will_return(self, at_s: float, rank: Rank) -> None:
        self._outlook.will_return(at_s, rank)

    def _make_policies(self, name: str) -> list[Policy]:
        setting = self._setting
        if name.partition("-")[0] == "oracle":
            return [Oracle(self._fleet(name), i, self._outlook) for i in range(setting.routers)]
        if name.partition("-")[0] == "ours":
            return super()._make_policies(name)
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
            "ttft_p50_s": quantile(ttft, 0.5),
            "ttft_p99_s": quantile(ttft, 0.99),
            "itl_mean_s": fmean(itl),
            "imbalance": max(busy) / fmean(busy),
            "cpu_s": cpu_s,
        }


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
        case "cache-aware":
            return CacheAware(num_ranks)
    raise ValueError(f"no policy {name!r}; there are {', '.join(POLICIES)}")
