"""These figures are of one run of sessions, and say how policies compare."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean

from bench.report import Row, verdict
from services.router.replay.planner import job_itl_s, job_ttft_s, quantile
from services.router.replay.workload import Job

NEW_TOKENS = (1_000, 4_000, 16_000)  # The edges between lengths of new parts.
_TTFT_S, _TTFT_TIMES, _ITL_S = 2.0, 2.0, 0.2
_ARRIVED_SHARE = 0.95
TIE = 0.03


@dataclass(frozen=True, slots=True)
class Figure:
    """One that is compared; `judged` ones are counted."""

    name: str
    is_better_high: bool = False
    is_judged: bool = False


FIGURES = (
    Figure("ttft_mean_s", is_judged=True),
    Figure("ttft_p99_s", is_judged=True),
    Figure("goodput_per_s", is_better_high=True, is_judged=True),
    Figure("hits", is_better_high=True, is_judged=True),
    Figure("computed_tokens"),
    Figure("jain", is_better_high=True),
    Figure("short_ttft_mean_s"),
    Figure("short_ttft_p99_s"),
)


def figures_of(jobs: Sequence[Job]) -> Row:
    """Return the figures of these requests, each of which has ended.

    Goodput is the share of the requests that were served within the targets, times the requests a second that
    came until 95 % of them had: one session that goes on long after all others does not count as idle time of
    them all. The targets are a first token within 2 s and twice the time to compute the new part, and tokens
    0.2 s apart in the mean. A session's share, of which Jain's index is, is the time
    that its new parts take to compute over the time that its first tokens took. Short prompts have less than
    1,000 new tokens. `alone_mean_s` is the mean TTFT of which none can be lower: all hit, and nothing waits.
    """
    ttft = sorted(job_ttft_s(job) for job in jobs)
    itl = [job_itl_s(job) for job in jobs]
    good = good_share(jobs)
    prompt_tokens = sum(job.request.prompt_tokens for job in jobs)
    computed_tokens = sum(job.computed_tokens for job in jobs)
    sessions: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for job in jobs:
        sums = sessions[job.request.session]
        sums[0] += _alone_s(job)
        sums[1] += job_ttft_s(job)
    return {
        "ttft_mean_s": fmean(ttft),
        "ttft_p50_s": quantile(ttft, 0.5),
        "ttft_p99_s": quantile(ttft, 0.99),
        "alone_mean_s": fmean(_alone_s(job) for job in jobs),
        "itl_mean_s": fmean(itl),
        "goodput_per_s": good * arrivals_per_s([job.request.arrival_s for job in jobs]),
        "good_share": good,
        "hits": 1 - computed_tokens / prompt_tokens,
        "computed_tokens": computed_tokens,
        "jain": jain([alone_s / took_s for alone_s, took_s in sessions.values()]),
        "remote_share": sum(job.prefill is not None for job in jobs) / len(jobs),
        **_by_new_tokens(jobs),
    }


def _by_new_tokens(jobs: Sequence[Job]) -> Row:
    row: Row = {}
    for least, below in zip((0, *NEW_TOKENS), (*NEW_TOKENS, float("inf")), strict=True):
        ttft = sorted(job_ttft_s(job) for job in jobs if least <= job.request.new_tokens < below)
        name = "short" if not least else f"from_{least}"
        row[f"{name}_ttft_mean_s"] = fmean(ttft) if ttft else None
        row[f"{name}_ttft_p99_s"] = quantile(ttft, 0.99) if ttft else None
    return row


def arrivals_per_s(arrivals_s: Sequence[float]) -> float:
    """Return how many came a second until 95 % of them had."""
    ordered = sorted(arrivals_s)[: max(2, int(_ARRIVED_SHARE * len(arrivals_s)))]
    return len(ordered) / (ordered[-1] - ordered[0])


def good_share(jobs: Sequence[Job]) -> float:
    """Return the share of the requests that were served within the targets."""
    good = sum(
        job_ttft_s(job) <= _TTFT_S + _TTFT_TIMES * _alone_s(job) and job_itl_s(job) <= _ITL_S for job in jobs
    )
    return good / len(jobs)


def _alone_s(job: Job) -> float:
    """Return the time to compute the new part."""
    return job.request.new_tokens / job.decode.timing.tokens_per_s


def jain(shares: Sequence[float]) -> float:
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


def ratios(by_policy: Mapping[str, Row]) -> list[Row]:
    """Return a row of each policy, its figures as ratios to ours."""
    ours = by_policy["ours"]
    return [
        {"policy": policy} | {figure.name: _ratio(row, ours, figure.name) for figure in FIGURES}
        for policy, row in by_policy.items()
    ]


def goals_of(at: str, by_policy: Mapping[str, Row], peers: Iterable[str], is_busy: bool) -> list[Row]:
    """Return what is wanted of ours in one cell, and whether it is so; of busy agents more is wanted."""
    rows, ours = [by_policy[peer] for peer in peers if peer in by_policy], by_policy["ours"]
    found: list[Row] = []

    def judge(goal: str, sign: str, wanted: float, name: str, beside: Sequence[Row]) -> None:
        known = [ratio for row in beside if (ratio := _ratio(ours, row, name)) is not None]
        if known:
            got = max(known) if sign == "<=" else min(known)
            found.append({"at": at} | verdict(goal, sign, wanted, got))

    if is_busy:
        judge("mean TTFT / best peer's", "<=", 0.75, "ttft_mean_s", rows)
        judge("goodput / best peer's", ">=", 1.15, "goodput_per_s", rows)
    judge(
        "mean TTFT / oracle's", "<=", 1.25, "ttft_mean_s", [by_policy[o] for o in by_policy if o == "oracle"]
    )
    judge("TTFT p99 of short prompts / best peer's", "<=", 1.1, "short_ttft_p99_s", rows)
    return found


def means_of(tables: Sequence[Sequence[Row]]) -> list[Row]:
    """Return the geometric means of tables with the same policies."""
    rows: list[Row] = []
    for same_policy in zip(*tables, strict=True):
        means: Row = {"policy": same_policy[0]["policy"]}
        for figure in FIGURES:
            known = [
                value for row in same_policy if isinstance(value := row[figure.name], float) and value > 0
            ]
            means[figure.name] = geometric_mean(known) if known else None
        rows.append(means)
    return rows


def counts_of(found: Sequence[Mapping[str, str]]) -> str:
    """Return how many cells ours leads, ties and loses, by figure and in all."""
    parts = []
    for figure in FIGURES:
        counts = Counter(verdicts[figure.name] for verdicts in found if figure.name in verdicts)
        if counts:
            parts.append(f"{figure.name} {_counted(counts)}")
    everything = Counter(verdict for verdicts in found for verdict in verdicts.values())
    return f"ours {_counted(everything)} of {len(found)} cells: {'; '.join(parts)}"


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{verdict} {counts[verdict]}" for verdict in ("leads", "ties", "loses"))


def _ratio(row: Row, ours: Row, name: str) -> float | None:
    value, of_ours = row[name], ours[name]
    if not isinstance(value, int | float) or not isinstance(of_ours, int | float):
        return None
    return value / of_ours if of_ours else None


def verdicts(by_policy: Mapping[str, Row], peers: Iterable[str]) -> dict[str, str]:
    """Return of each judged figure whether ours leads the best of the peers, ties with it or loses."""
    rows = [by_policy[peer] for peer in peers if peer in by_policy]
    found: dict[str, str] = {}
    for figure in FIGURES:
        all_ratios = [_ratio(row, by_policy["ours"], figure.name) for row in rows]
        known = [ratio for ratio in all_ratios if ratio is not None]
        if figure.is_judged and known:
            best = max(known) if figure.is_better_high else min(known)
            worse = best - 1 if figure.is_better_high else 1 - best
            found[figure.name] = "loses" if worse > TIE else "ties" if worse >= -TIE else "leads"
    return found
