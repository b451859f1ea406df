"""The speeds of a cluster are worked out here from what its requests took.

    compute_s = a for each chunk + b for each token          of the role that computed
    itl_s     = a + b for each sequence that its rank decodes beside it

What a request took more than that, or less, is kept as its own: the router's work, hops, and what no model
says, but not its waits for others. A replay adds it to what it predicts for the same request.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from statistics import fmean, median

from services.router.replay.observed import Fleet, Observed
from services.router.replay.setting import Timing

_FEW = 8  # So many requests at least tell a speed.
_TURNS = 30
_EXACT = 0.01  # A smaller relative error counts as this.
_ALONE = 0.1  # A prompt was computed alone if others were for no more than this part of its time.
_FAST = 0.1  # So many of those that were not are taken to have had no chunks of others between theirs.
_HOP_S = 0.0005
_PRIOR_TOKENS_PER_S, _PRIOR_STEP_S, _PRIOR_BYTES_PER_S = 10_000.0, 0.02, 1e9


@dataclass(frozen=True, slots=True)
class FittedSpeeds:
    prefill: Timing
    decode: Timing
    measured: frozenset[str]  # Each of "prefill", "decode", "steps" and "transfer" that was measured.
    beyond_s: Sequence[float]  # Each request's first token took so much of its own, or less.


def speeds_of(fleet: Fleet, requests: Sequence[Observed], others: float = 1.0) -> FittedSpeeds:
    """Return the speeds of ranks that serve `others` times these requests."""
    remote = [seen for seen in requests if seen.is_remote and seen.computed_tokens]
    local = [seen for seen in requests if not seen.is_remote and seen.computed_tokens]
    beside_remote, beside_local = _Beside(remote, others), _Beside(local, others)
    compute = {
        "prefill": _compute(remote, fleet, beside_remote),
        "decode": _compute(local, fleet, beside_local),
    }
    measured = {role for role, found in compute.items() if found is not None}
    usual = compute["prefill"] or compute["decode"] or (0.0, 1 / (fleet.tokens_per_s or _PRIOR_TOKENS_PER_S))
    steps, bytes_per_s = _steps(fleet, requests, others), _bandwidth(fleet, remote)
    measured |= {"steps"} if steps is not None else set()
    measured |= {"transfer"} if bytes_per_s is not None else set()
    step_s, step_s_per_sequence = steps or (fleet.step_s or _PRIOR_STEP_S, 0.0)

    def timing(role: str) -> Timing:
        chunk_s, token_s = compute[role] or usual
        return Timing(
            block_tokens=fleet.block_tokens,
            tokens_per_s=1 / max(token_s, 1e-9),
            chunk_tokens=fleet.chunk_tokens,
            shorter_first=0.0 if fleet.computes_in_order else Timing().shorter_first,
            kv_bytes_per_token=round(fleet.kv_bytes_per_token),
            state_bytes=fleet.carried_bytes,
            bytes_per_s=bytes_per_s or _PRIOR_BYTES_PER_S,
            hop_s=_HOP_S,
            step_s=step_s,
            step_s_per_sequence=step_s_per_sequence,
            chunk_step_s=chunk_s,
        )

    prefill, decode = timing("prefill"), timing("decode")
    beyond_s = [
        _beyond_s(seen, *((prefill, beside_remote) if seen.is_remote else (decode, beside_local)))
        for seen in requests
    ]
    return FittedSpeeds(prefill, decode, frozenset(measured), beyond_s)


class _Beside:
    """A rank may compute others' chunks between a prompt's own, and the prompt's time has them in it. Which
    rank computed one is not known, but that others cannot have taken longer than they were computed at the
    same time."""

    def __init__(self, requests: Sequence[Observed], others: float) -> None:
        self._overlap = _Overlap(map(_computing, requests))
        self._others = others

    def seconds(self, seen: Observed) -> float:
        return self._others * max(0.0, self._overlap.seconds(*_computing(seen)) - seen.compute_s)


def _beyond_s(seen: Observed, timing: Timing, beside: _Beside) -> float:
    """A replay has waits of its own, so that what others may have taken of its time is left out."""
    if not seen.ttft_s:  # It has no token yet.
        return 0.0
    chunks, hops = -(-seen.computed_tokens // timing.chunk_tokens), 3 if seen.is_remote else 1
    compute_s = chunks * timing.chunk_step_s + seen.computed_tokens / timing.tokens_per_s
    compute_s += max(0.0, min(seen.compute_s - compute_s, beside.seconds(seen)))
    return seen.ttft_s - seen.queue_s - compute_s - seen.transfer_s - hops * timing.hop_s


def _compute(requests: Sequence[Observed], fleet: Fleet, beside: _Beside) -> tuple[float, float] | None:
    """Return the seconds of a chunk and of a token, as prompts took that were computed alone. Of the others
    those that took least are believed."""
    computed = [seen for seen in requests if seen.compute_s > 0]
    points = [
        (float(-(-seen.computed_tokens // fleet.chunk_tokens)), float(seen.computed_tokens), seen.compute_s)
        for seen in computed
    ]
    shares = [0.5 if beside.seconds(seen) <= _ALONE * seen.compute_s else _FAST for seen in computed]
    return fitted(points, shares) if len(points) >= _FEW else None


def _bandwidth(fleet: Fleet, remote: Sequence[Observed]) -> float | None:
    """Return the bytes a second of a transfer that waits for no other one.

    Chunks are sent as they are computed, so a prompt waits for its last chunk, or for all that was not sent
    while it was computed. Who waited for others' transfers, too, was slower: the fast quarter is believed.
    """
    found = []
    for seen in remote:
        if seen.transfer_s > 0 and seen.moved_tokens:
            whole = seen.moved_tokens * fleet.kv_bytes_per_token + fleet.carried_bytes
            last = min(seen.moved_tokens, fleet.chunk_tokens) * fleet.kv_bytes_per_token + fleet.carried_bytes
            found.append(max(last / seen.transfer_s, whole / (seen.transfer_s + seen.compute_s)))
    return sorted(found)[3 * len(found) // 4] if len(found) >= _FEW else None


def _steps(fleet: Fleet, requests: Sequence[Observed], others: float) -> tuple[float, float] | None:
    """Return the seconds of a step, and those more of each sequence in it. Steps with a chunk of a prompt are
    not counted, as far as the chunks are known."""
    running = _Overlap((seen.arrival_s + seen.ttft_s, seen.ended_s) for seen in requests)
    local = [seen for seen in requests if not seen.is_remote and seen.computed_tokens]
    prompts = _Overlap(map(_computing, local))
    chunks = sum(-(-seen.computed_tokens // fleet.chunk_tokens) for seen in local)
    chunk_s = sum(seen.compute_s for seen in local) / max(1, chunks)
    share = others / max(1, fleet.decode)
    points = []
    for seen in requests:
        began_s, took_s = seen.arrival_s + seen.ttft_s, seen.duration_s - seen.ttft_s
        if seen.output_tokens < _FEW or took_s <= 0:
            continue
        beside_s = share * prompts.seconds(began_s, seen.ended_s)
        beside = running.seconds(began_s, seen.ended_s) / took_s - 1
        batch = max(1.0, (1 + others * beside) / max(1, fleet.decode))
        steps = seen.output_tokens - 1 - (beside_s / chunk_s if chunk_s else 0.0)
        if steps >= 1 and beside_s < took_s:
            points.append((1.0, batch, (took_s - beside_s) / steps))
    return fitted(points) if len(points) >= _FEW else None


def _computing(seen: Observed) -> tuple[float, float]:
    ended_s = seen.arrival_s + seen.ttft_s - seen.transfer_s
    return ended_s - seen.compute_s, ended_s


class _Overlap:
    """Intervals, and how many of them there are at each moment."""

    def __init__(self, intervals: Iterable[tuple[float, float]]) -> None:
        known = [(began_s, ended_s) for began_s, ended_s in intervals if ended_s > began_s]
        changes = sorted([(began_s, 1) for began_s, _ in known] + [(ended_s, -1) for _, ended_s in known])
        self._at_s, self._sums, self._counts = [float("-inf")], [0.0], [0]
        for at_s, change in changes:
            passed_s = at_s - self._at_s[-1] if self._counts[-1] else 0.0
            self._sums.append(self._sums[-1] + self._counts[-1] * passed_s)
            self._at_s.append(at_s)
            self._counts.append(self._counts[-1] + change)

    def seconds(self, began_s: float, ended_s: float) -> float:
        """Return the intervals' seconds between the two, added up."""
        return self._until(ended_s) - self._until(began_s)

    def _until(self, at_s: float) -> float:
        index = bisect_right(self._at_s, at_s) - 1
        count = self._counts[index]
        return self._sums[index] + (count * (at_s - self._at_s[index]) if count else 0.0)


def fitted(
    points: Sequence[tuple[float, float, float]], shares: Iterable[float] = repeat(0.5)
) -> tuple[float, float]:
    """Return a and b of z = a x + b y, neither below 0, with the least sum of relative errors. `shares` tell
    how likely each point is below the line, and the less likely, the less its error above that weighs.

    A few points that are far off change that little, where they would decide a sum of squares.
    """
    usual = median(z for _, _, z in points)
    a, b = _least_squares(points, [usual] * len(points))
    for _ in range(_TURNS):
        scales = []
        for (x, y, z), share in zip(points, shares, strict=False):
            # By what was measured, and not by what was fitted before, the short ones would count most.
            expected = max(a * x + b * y, usual / 8)
            off = (z - a * x - b * y) / expected
            weight = (share if off > 0 else 1 - share) / max(abs(off), _EXACT)
            scales.append(expected / weight**0.5)
        a, b = _least_squares(points, scales)
    return a, b


def _least_squares(
    points: Sequence[tuple[float, float, float]], scales: Sequence[float]
) -> tuple[float, float]:
    weighted = [(x / s, y / s, z / s) for (x, y, z), s in zip(points, scales, strict=True)]

    def total(product: Callable[[float, float, float], float]) -> float:
        return fmean(product(*point) for point in weighted)

    xx, yy, xy = total(lambda x, y, z: x * x), total(lambda x, y, z: y * y), total(lambda x, y, z: x * y)
    xz, yz = total(lambda x, y, z: x * z), total(lambda x, y, z: y * z)
    determinant = xx * yy - xy * xy
    if determinant > 1e-9 * xx * yy:
        a, b = (xz * yy - yz * xy) / determinant, (yz * xx - xz * xy) / determinant
        if a >= 0 and b >= 0:
            return a, b
    only_x, only_y = (xz / xx if xx else 0.0), (yz / yy if yy else 0.0)
    off_x = total(lambda x, y, z: (only_x * x - z) ** 2)
    return (only_x, 0.0) if off_x < total(lambda x, y, z: (only_y * y - z) ** 2) else (0.0, only_y)
