"""`isthmus plan` tells how many prefill and decode ranks the last minutes' requests need."""

import asyncio
import json
import secrets
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from services.cli import screen
from services.cli.router_client import ClientConfig, ask
from services.cli.table import fold, format_table
from services.router.replay.messages import load_from_proto
from services.router.replay.observed import Observation, merged
from services.router.replay.planner import Advice, Goals, Outlook, advise, quantile
from services.settings.flags import Bounds, check_bounds, load, setting
from services.values.errors import NotFound
from services.wire.isthmus.v1 import generation_pb2

_HEADINGS = (
    *("", "prefill", "decode", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99"),
    *("goodput", "reused", "busy"),
)
_LEAD = ("", "prefill", "decode", "goodput")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig(ClientConfig):
    """Tell how many ranks of each role are enough, from what routers saw in the last minutes.

    Exit code 1 means that no number of ranks that was tried meets the goals.
    """

    ttft_s: float = setting(2.0, "goal: seconds until a request's first token", bounds=Bounds(above=0))
    itl_ms: float = setting(
        100.0, "goal: milliseconds between two tokens of a request, in the mean", bounds=Bounds(above=0)
    )
    goodput: float = setting(
        0.95, "goal: the share of requests that are within both", bounds=Bounds(above=0, at_most=0.9999)
    )
    load: float = setting(
        1.0, "plan for so many times the load that was seen", bounds=Bounds(at_least=0.1, at_most=10)
    )
    window_s: float = setting(600.0, "go by the requests of so many seconds", bounds=Bounds(at_least=10))
    model: str = setting("", "plan for this model alone; default: each that the router serves")
    routers: tuple[str, ...] = setting(
        (),
        "HOST:PORT of all routers, whose requests count together; default: --router alone, and as many more "
        "from each other one",
    )
    json: bool = setting(False, "write everything that was predicted as JSON")

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def goals(self) -> Goals:
        return Goals(self.ttft_s, self.itl_ms / 1e3, self.goodput)


def run(argv: list[str]) -> int:
    config = load(PlanConfig, argv, prog="isthmus plan")
    seen = asyncio.run(observations(config))
    planned = [one for one in seen if one.requests and one.fleet.decode]
    if not planned:
        raise NotFound("no requests of the last minutes are known: there is nothing to plan from")
    advices = [advise(one, config.goals, config.load) for one in planned]
    if config.json:
        print(json.dumps([as_json(advice) for advice in advices], indent=2))
    else:
        print("\n\n".join(format_advice(advice, screen.width()) for advice in advices))
    for one in seen:
        if one not in planned:
            print(f"{one.fleet.model}: no requests, or no decode ranks", file=sys.stderr)
    return 0 if all(advice.least is not None for advice in advices) else 1


async def observations(config: PlanConfig) -> list[Observation]:
    """Ask each router, and return what all of them saw of each model."""
    routers = config.routers or (config.router,)
    request = generation_pb2.ListLoadRequest(salt=secrets.randbits(64), model=config.model)
    asked = (ask(replace(config, router=router), "ListLoad", request, timeout_s=30) for router in routers)
    answers = await asyncio.gather(*asked)
    by_model: dict[str, list[Observation]] = {}
    for message in (each for answer in answers for each in answer.models):
        seen = load_from_proto(message)
        recent = [each for each in seen.requests if each.arrival_s >= -config.window_s]
        by_model.setdefault(message.model, []).append(replace(seen, requests=recent))
    return [merged(each) for each in by_model.values()]


def format_advice(advice: Advice, width: int | None = None) -> str:
    """Format the sizes that were tried, and what follows from them."""
    rows = [_row(outlook, advice) for outlook in advice.tried]
    lines = [*_head(advice), "", format_table(_HEADINGS, rows, width, _LEAD), ""]
    warnings = (f"beware: {warning}" for warning in advice.warnings)
    lines += [fold(line, width, indent=2) for line in (*_verdict(advice), *warnings)]
    return "\n".join(lines)


def _head(advice: Advice) -> Iterator[str]:
    requests, goals = advice.observation.requests, advice.goals
    span_s = max(1.0, requests[-1].arrival_s - requests[0].arrival_s)
    ttft = sorted(seen.ttft_s for seen in requests if seen.ttft_s) or [0.0]
    prompt_tokens = sum(seen.prompt_tokens for seen in requests)
    reused = sum(seen.reused_tokens for seen in requests) / max(1, prompt_tokens)
    yield (
        f"{advice.observation.fleet.model}: {len(requests)} requests in {span_s:.0f} s, "
        f"{prompt_tokens / len(requests):.0f} prompt tokens each, {reused:.0%} reused; "
        f"TTFT p50 {_ms(quantile(ttft, 0.5))}, p99 {_ms(quantile(ttft, 0.99))}"
    )
    within = f"TTFT {_ms(goals.ttft_s)} and ITL {_ms(goals.itl_s)} for {goals.share:.4g} of the requests"
    yield f"goals: {within}" + ("" if advice.load == 1 else f", under {advice.load:g} times the load")


def _row(outlook: Outlook, advice: Advice) -> tuple[object, ...]:
    marks = []
    if outlook.size == advice.present.size:
        marks.append("now")
    if advice.least is not None and outlook.size == advice.least.size:
        marks.append("least")
    if outlook.size.prefill == 0 and advice.observation.fleet.prefill:
        marks.append("together")
    return (
        " ".join(marks) or ("enough" if outlook.meets else ""),
        outlook.size.prefill,
        outlook.size.decode,
        _ms(outlook.ttft_p50_s),
        _ms(outlook.ttft_p99_s),
        _ms(outlook.itl_p50_s),
        _ms(outlook.itl_p99_s),
        f"{outlook.goodput:.3f}",
        f"{outlook.reused:.0%}",
        f"{max(outlook.prefill_busy, outlook.decode_busy):.0%}",
    )


def _verdict(advice: Advice) -> Iterator[str]:
    least, present = advice.least, advice.present
    if least is None:
        yield "no number of ranks that was tried meets the goals: what is missed is not a queue's"
    elif least.size == present.size:
        yield f"the present ranks are the least that meet the goals: {_counted(least)}"
    else:
        yield f"the least that meet the goals: {_counted(least)}; now: {_counted(present)}"
    if advice.split_loses:
        yield advice.split_loses


def _counted(outlook: Outlook) -> str:
    size = outlook.size
    return f"{size.prefill} prefill, {size.decode} decode" if size.prefill else f"{size.decode} that do both"


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.0f} ms"


def as_json(advice: Advice) -> dict[str, Any]:
    def shown(outlook: Outlook | None) -> dict[str, Any] | None:
        if outlook is None:
            return None
        return {**asdict(outlook.size), **{k: v for k, v in asdict(outlook).items() if k != "size"}}

    return {
        "model": advice.observation.fleet.model,
        "requests": len(advice.observation.requests),
        "goals": asdict(advice.goals),
        "load": advice.load,
        "present": shown(advice.present),
        "least": shown(advice.least),
        "together": shown(advice.together),
        "tried": [shown(outlook) for outlook in advice.tried],
        "split_loses": advice.split_loses,
        "warnings": list(advice.warnings),
    }
