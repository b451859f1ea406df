"""A router that is given goals plans every some seconds how many ranks they need, and reports it: what
scales ranks goes by isthmus_plan_wanted_ranks.

    ObservedLoad --> a process that replays (services/router/replay) --> Steady --> metrics

One model is planned after the other, so that one process runs at most. A plan that fails or takes too long is
logged, and the metrics stay as they were, with their age.
"""

import asyncio
import logging
import pickle
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Gauge

from services.observe import log_lines
from services.router.models import Models
from services.router.observed_load import ObservedLoad
from services.router.replay.following import PlannerJob, RankPlan, Steady
from services.router.replay.observed import Fleet
from services.router.replay.planner import Goals, Outlook, Size
from services.router.served_model import Model

log = logging.getLogger(__name__)

_COMMAND = (sys.executable, "-m", "services.router.replay")
_LONGEST_S = 300.0  # On a crowded host a plan may take minutes.
# Whatever prints to the planner's standard output spoils its answer.
_UNREADABLE = pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError
_LEAST = Size(1, 1), Size(0, 1)  # where prefill ranks are apart, and where they are not


class PlanMetrics:
    """A model has them once it was planned."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._planned_s = 0.0
        self.wanted = Gauge(
            "isthmus_plan_wanted_ranks",
            "Ranks that the load of all routers needs for the goals (--plan-ttft-s, --plan-itl-ms), as this "
            "router sees it: the largest of several routers' counts.",
            ["role"],
            registry=registry,
        )
        self.goodput = Gauge(
            "isthmus_plan_goodput",
            "The share of requests within the goals that is predicted for the present ranks, and for those "
            "that the last plan wanted, under --plan-headroom times the load.",
            ["ranks"],
            registry=registry,
        )
        self.ttft = Gauge(
            "isthmus_plan_ttft_p99_seconds",
            "The 99th percentile of TTFT that is predicted for these ranks.",
            ["ranks"],
            registry=registry,
        )
        age = Gauge(
            "isthmus_plan_age_seconds",
            "The time since the last plan: it grows while plans fail.",
            registry=registry,
        )
        age.set_function(lambda: self._clock() - self._planned_s)

    def tell(self, wanted: Size, plan: RankPlan | None) -> None:
        self._planned_s = self._clock()
        self.wanted.labels("prefill").set(wanted.prefill)
        self.wanted.labels("decode").set(wanted.decode)
        if plan is not None:
            self._tell_outlook("present", plan.present)
            if plan.wanted is not None:
                self._tell_outlook("wanted", plan.wanted)

    def _tell_outlook(self, ranks: str, outlook: Outlook) -> None:
        self.goodput.labels(ranks).set(outlook.goodput)
        self.ttft.labels(ranks).set(outlook.ttft_p99_s)


@dataclass(slots=True)
class _Planned:
    model: Model
    steady: Steady
    metrics: PlanMetrics | None = None
    last: Size | None = field(default=None)


class Planning:
    """The router's loop owns it. `ask` answers a job in another process, for `headroom` times the load."""

    def __init__(
        self,
        models: Models,
        load: ObservedLoad,
        goals: Goals,
        every_s: float,
        down_s: float,
        window_s: float,
        headroom: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._models = models
        self._load = load
        self._goals = goals
        self._every_s = every_s
        self._down_s = down_s
        self._window_s = window_s
        self._headroom = headroom
        self._clock = clock
        self._began_s = clock()
        self._planned: dict[str, _Planned] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            await self.plan()

    async def plan(self) -> None:
        models = (self._models.default, *self._models.others.values())
        known = self._planned
        self._planned = {
            model.name: known[model.name]
            if model.name in known and known[model.name].model is model
            else _Planned(model, Steady(self._down_s))
            for model in models
        }
        for each in list(self._planned.values()):
            try:
                await self._plan(each)
            except Exception:  # It is a defect of ours, which must not end the router.
                log.exception("plan_broken model=%s", each.model.name)

    async def _plan(self, each: _Planned) -> None:
        seen = self._load.observation(each.model)
        if not seen.fleet.decode:
            return
        if not seen.requests:
            if self._clock() - self._began_s >= self._window_s:
                self._tell(each, _LEAST[0] if seen.fleet.prefill else _LEAST[1], None, seen.fleet)
            return
        try:
            plan = await self.ask(PlannerJob(seen, self._goals, self._headroom))
        except (OSError, ValueError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            log_lines.event(log, "plan_failed", level=logging.WARNING, model=each.model.name, reason=why)
            return
        # Where nothing is enough those that there are stay.
        self._tell(each, (plan.wanted or plan.present).size, plan, seen.fleet)

    def _tell(self, each: _Planned, size: Size, plan: RankPlan | None, fleet: Fleet) -> None:
        wanted = each.steady.wanted(self._clock(), size, Size(fleet.prefill, fleet.decode))
        if each.metrics is None:
            each.metrics = PlanMetrics(each.model.registry, self._clock)
        each.metrics.tell(wanted, plan)
        if wanted != each.last:
            name = each.model.name
            log_lines.event(log, "ranks_wanted", model=name, prefill=wanted.prefill, decode=wanted.decode)
        each.last = wanted

    async def ask(self, job: PlannerJob) -> RankPlan:
        """Let another process plan. Raises OSError, ValueError or TimeoutError."""
        process = await asyncio.create_subprocess_exec(
            *_COMMAND,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(_LONGEST_S):
                out, errors = await process.communicate(pickle.dumps(job))
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            last = errors.decode(errors="replace").strip().rpartition("\n")[2]
            raise ValueError(last or f"the planner ended with {process.returncode}")
        try:
            plan = pickle.loads(out)
        except _UNREADABLE as error:
            raise ValueError(f"the planner's answer cannot be read: {error!r}") from error
        assert isinstance(plan, RankPlan)
        return plan
