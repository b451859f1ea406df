"""A meter notes each request while it runs. The definitions are those of sglang.bench_serving:

    TTFT   sent until the first tokens came
    ITL    between tokens; those that came together share the time since the ones before
    TPOT   (E2E - TTFT) / (tokens - 1), of a request with more than one
    E2E    sent until the answer ended

Only what has ended counts in them.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from services.cli.bench.samples import Samples
from services.cli.bench.side import Came, Counts


@dataclass(slots=True)
class Running:
    sent_s: float
    num_tokens: int = 0
    ttft_s: float = 0.0
    last_s: float = 0.0
    # Each item has the seconds between tokens, and how many.
    gaps: list[tuple[float, int]] = field(default_factory=list)

    def came(self, num_tokens: int, now_s: float) -> None:
        if self.num_tokens:
            self.gaps.append(((now_s - self.last_s) / num_tokens, num_tokens))
        else:
            self.ttft_s = now_s - self.sent_s
        self.num_tokens += num_tokens
        self.last_s = now_s


class Meter:
    def __init__(self, clock: Callable[[], float]) -> None:
        self.ttft, self.itl, self.tpot, self.e2e = (Samples() for _ in range(4))
        self.counts = Counts()
        self.sent = self.completed = self.cut_off = self.running = self.most_running = 0
        self.stopped = False  # It was stopped before its end.
        self.errors: Counter[str] = Counter()
        self.first_errors: dict[str, str] = {}
        self.tokens_by_second: Counter[int] = Counter()
        self.began_s = self.ended_s = clock()
        self._clock = clock

    def begin(self) -> Running:
        self.sent += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        return Running(self._clock())

    def note(self, request: Running, came: Came) -> None:
        if came.num_tokens:
            now_s = self._clock()
            request.came(came.num_tokens, now_s)
            self.tokens_by_second[int(now_s - self.began_s)] += came.num_tokens

    def end(self, request: Running, counts: Counts) -> None:
        now_s = self._clock()
        e2e_s = now_s - request.sent_s
        self._leave(now_s)
        self.completed += 1
        self.counts += counts
        self.ttft.add(request.ttft_s)
        self.e2e.add(e2e_s)
        if counts.completion_tokens > 1:
            self.tpot.add((e2e_s - request.ttft_s) / (counts.completion_tokens - 1))
        for gap_s, times in request.gaps:
            self.itl.add(gap_s, times)

    def fail(self, error: BaseException) -> None:
        name = type(error).__name__
        self._leave(self._clock())
        self.errors[name] += 1
        self.first_errors.setdefault(name, str(error))

    def cut(self) -> None:
        self._leave(self._clock())
        self.cut_off += 1

    def _leave(self, now_s: float) -> None:
        self.running -= 1
        self.ended_s = now_s

    @property
    def duration_s(self) -> float:
        return max(self.ended_s - self.began_s, 1e-9)
