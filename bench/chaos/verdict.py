"""The verdict makes figures out of answers, faults and books. It is pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.chaos.answers import Answer, Ended, Failure, Span
from bench.chaos.schedule import Fault, Kind, Target
from bench.report import Row, verdict

GOALS = (
    ("answers", ">=", 1.0),
    ("faults", ">=", 1.0),
    ("pulled_tokens", ">=", 1.0),
    ("read_tokens", ">=", 1.0),
    ("shared_tokens", ">=", 1.0),
    ("wrong", "<=", 0.0),
    ("lost", "<=", 0.0),
    ("unmended", "<=", 0.0),
    ("tracebacks", "<=", 0.0),
    ("digest_mismatches", "<=", 0.0),
    ("left", "<=", 0.0),
)


@dataclass(frozen=True, slots=True)
class Played:
    """A fault as it happened: until the stopped process went on or the killed one was started again."""

    fault: Fault
    span: Span


@dataclass(frozen=True, slots=True)
class Judged:
    """An answer and what the oracle says: wrong in a token, ended early, or against itself."""

    answer: Answer
    near_ties: int
    wrong: str  # "": nothing is


@dataclass(frozen=True, slots=True)
class Books:
    """These books say what is left when nobody is at work. `ranks` are those with more than free and cached
    pages, or that have files of tiers open which are none of theirs, and what."""

    ranks: Mapping[str, str]
    in_etcd: Sequence[str]  # keys and leases of ranks
    processes: Sequence[str]
    shared_memory: Sequence[str]
    exits: Mapping[str, int]  # of services that were told to stop and did not end with 0

    @property
    def left(self) -> list[str]:
        """One sentence for each thing that should not be there."""
        return [
            *(f"rank {name}: {what}" for name, what in self.ranks.items()),
            *(f"in etcd: {what}" for what in self.in_etcd),
            *(f"process {process}" for process in self.processes),
            *(f"shared memory {name}" for name in self.shared_memory),
            *(f"{name} ended with exit code {code}" for name, code in self.exits.items()),
        ]


@dataclass(frozen=True, slots=True)
class Run:
    seconds: float
    judged: Sequence[Judged]
    played: Sequence[Played]
    waves: Sequence[Span]  # from a wave's first fault until the cluster is whole again
    unmended: Sequence[str]
    tracebacks: Mapping[str, int]
    digest_mismatches: int
    books: Books
    handed_tokens: int = 0  # to other ranks, by those that were drained or told to end
    found_tokens: int = 0  # in tiers, by ranks that were started again
    read_tokens: float = 0.0  # from tiers
    shared_tokens: float = 0.0  # of that, from the files of other ranks

    @property
    def answers(self) -> list[Answer]:
        return [each.answer for each in self.judged]

    @property
    def failures(self) -> list[Failure]:
        return [failure for answer in self.answers for failure in answer.failures]

    def sentences(self) -> list[str]:
        return [
            *(
                f"wrong: answer {each.answer.asked.number}: {each.wrong}"
                for each in self.judged
                if each.wrong
            ),
            *(f"lost: {_lost(answer)}" for answer in self.answers if answer.ended is Ended.LOST),
            *(f"not mended: {what}" for what in self.unmended),
            *(f"{count} times: {text}" for text, count in self.tracebacks.items()),
            *(f"left: {what}" for what in self.books.left),
        ]


def wrong_of(answer: Answer, wrong_at: int | None, first: Answer | None, near_ties: Iterable[int]) -> str:
    """Return what is wrong with an answer, or "". `first` is the one whose request it repeats, `near_ties`
    the places at which rounding may have chosen, in either."""
    asked = answer.asked
    if wrong_at is not None:
        return f"token {wrong_at} of {len(answer.tokens)} is not the one"
    if answer.contradicts:
        return "began with other tokens when asked again after its router died"
    if len(answer.tokens) > asked.max_tokens:
        return f"{len(answer.tokens)} tokens where {asked.max_tokens} were asked for"
    if answer.ended is Ended.FINISHED and len(answer.tokens) != asked.max_tokens:
        return f"ended after {len(answer.tokens)} tokens of {asked.max_tokens}"
    parted = _parted(answer.tokens, first.tokens) if first is not None else None
    if parted is not None and parted not in set(near_ties):
        return f"token {parted} differs from the first answer's"
    return ""


def _lost(answer: Answer) -> str:
    last = answer.failures[-1]
    return (
        f"answer {answer.asked.number} over {answer.asked.front} at {last.at_s:.1f} s after "
        f"{len(answer.tokens)} tokens: {last.text} ({last.router})"
    )


def _parted(tokens: Sequence[int], others: Sequence[int]) -> int | None:
    """The first place at which the two differ, as far as both go."""
    places = range(min(len(tokens), len(others)))
    return next((place for place in places if tokens[place] != others[place]), None)


def summary(run: Run) -> Row:
    answers = run.answers
    ended = Counter(answer.ended for answer in answers)
    first = {answer.asked.number: answer for answer in answers}
    again = [(a, first[a.asked.again]) for a in answers if a.asked.again is not None]
    return {
        "seconds": run.seconds,
        "answers": ended[Ended.FINISHED],
        "cancelled": ended[Ended.CANCELLED],
        "tokens": sum(len(answer.tokens) for answer in answers),
        "sampled_answers": sum(not a.asked.greedy and a.ended is Ended.FINISHED for a in answers),
        "asked_again": len(again),
        "again_elsewhere": sum(a.decode_rank != b.decode_rank for a, b in again),
        "near_ties": sum(each.near_ties for each in run.judged),
        "pulled_tokens": sum(answer.pulled_tokens for answer in answers),
        "handed_tokens": run.handed_tokens,
        "found_tokens": run.found_tokens,
        "read_tokens": run.read_tokens,
        "shared_tokens": run.shared_tokens,
        "waves": len(run.waves),
        "faults": len(run.played),
        "retried": sum(failure.router_died for failure in run.failures),
        "wrong": sum(bool(each.wrong) for each in run.judged),
        "lost": ended[Ended.LOST],
        "unmended": len(run.unmended),
        "mended_max_s": max(
            (wave.lasts_s - _faults_last_s(wave, run.played) for wave in run.waves), default=None
        ),
        "tracebacks": sum(run.tracebacks.values()),
        "digest_mismatches": run.digest_mismatches,
        "left": len(run.books.left),
    }


def _faults_last_s(wave: Span, played: Iterable[Played]) -> float:
    ends = [each.span.end_s for each in played if each.span.overlaps(wave)]
    return max(ends, default=wave.begin_s) - wave.begin_s


def verdicts(row: Row) -> list[Row]:
    return [verdict(goal, sign, wanted, row[goal]) for goal, sign, wanted in GOALS]


def faults_by_kind(played: Iterable[Played]) -> list[Row]:
    counts = Counter((each.fault.target, each.fault.kind) for each in played)
    return [
        {"target": target.value, **{kind.value: counts[target, kind] for kind in Kind}} for target in Target
    ]


def errors_by_status(failures: Iterable[Failure]) -> list[Row]:
    """Return for each status how often a router's death was the reason, and the client asked another one; and
    how often it was not, which is an answer lost."""
    counts = Counter((failure.status, failure.router_died) for failure in failures)
    return [
        {"status": status, "retried": counts[status, True], "lost": counts[status, False]}
        for status in sorted({status for status, _ in counts})
    ]


_WHENS = ("own router stopped", "during faults", "otherwise")


def waits(run: Run) -> list[Row]:
    """Times to the first token, and gaps between tokens: while a router that was asked stood still, which
    nobody can help, during waves else, and between them."""
    first = [(answer, span) for answer in run.answers if (span := answer.ttft) is not None]
    gaps = [(answer, gap) for answer in run.answers for gap in answer.gaps]
    return [
        _spread(what, when, [span.lasts_s for answer, span in spans if _when(answer, span, run) == when])
        for what, spans in (("first token", first), ("gap", gaps))
        for when in _WHENS
    ]


def _when(answer: Answer, span: Span, run: Run) -> str:
    if not any(span.overlaps(wave) for wave in run.waves):
        return "otherwise"
    stops = [one for one in run.played if one.fault.kind is Kind.STOP and one.fault.name in answer.routers]
    return "own router stopped" if any(span.overlaps(stop.span) for stop in stops) else "during faults"


def _spread(what: str, when: str, seconds: Sequence[float]) -> Row:
    ordered = sorted(seconds)
    shares = {"p50_s": 0.5, "p99_s": 0.99, "max_s": 1.0}
    figures = {name: _percentile(ordered, share) for name, share in shares.items()}
    return {"what": what, "when": when, "count": len(ordered), **figures}


def _percentile(ordered: Sequence[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def longest_waits(run: Run, count: int = 5) -> list[Row]:
    """The answers with the longest silence, and what was done meanwhile or not long before."""
    silences = [
        (span, answer) for answer in run.answers for span in (answer.ttft, *answer.gaps) if span is not None
    ]
    worst = sorted(silences, key=lambda each: -each[0].lasts_s)[:count]
    return [
        {
            "lasts_s": span.lasts_s,
            "at_s": span.begin_s,
            "answer": answer.asked.number,
            "front": answer.asked.front.value,
            "what": "first token" if span == answer.ttft else "gap",
            "routers": " ".join(sorted(answer.routers)),
            "faults": ", ".join(_meanwhile(span, run.played)) or "-",
        }
        for span, answer in worst
    ]


def _meanwhile(span: Span, played: Iterable[Played]) -> list[str]:
    return [
        f"{each.fault.kind} {each.fault.name} ({each.span.begin_s - span.begin_s:+.1f} s, "
        f"{each.span.lasts_s:.1f} s)"
        for each in played
        if each.span.overlaps(span)
    ]
