"""The self-check cuts random sequences into steps here, and its findings accept or refuse the model.

It is pure. The sequences are:

- `a` has chunks alone. The first is shorter than a scan, and no end except `border` is a multiple of 64. The
  sequence is longer than windows reach.
- `whole` is one chunk longer than a scan, then single tokens.
- `mixed` is a prompt of one token, then single tokens between chunks, so that each form continues from the
  other's state.
- `first` ends soon, and `second` begins in the slot that `first` had.
- `again` continues at a's border from a copy of its state with other cuts, after a has gone on.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

# Mamba-2 scans 128 or 256 tokens at a time, and delta nets scan 64.
_LONGEST_SCAN = 256
_LEAST_BORDER = 112
_AFTER_A_WINDOW = 40


@dataclass(frozen=True, slots=True)
class Cut:
    """A sequence is cut into chunks of these lengths.

    Their steps are first_step, first_step + 1, ...
    """

    lengths: tuple[int, ...]
    start: int = 0  # Another sequence has computed so many tokens.
    first_step: int = 0

    @property
    def end(self) -> int:
        return self.start + sum(self.lengths)

    @property
    def last_step(self) -> int:
        return self.first_step + len(self.lengths) - 1

    def at(self, step: int) -> range | None:
        chunks = list(self.chunks())
        return chunks[step - self.first_step] if self.first_step <= step <= self.last_step else None

    def chunks(self) -> Iterator[range]:
        start = self.start
        for length in self.lengths:
            yield range(start, start + length)
            start += length


@dataclass(frozen=True, slots=True)
class CheckTrial:
    together: Mapping[str, Cut]
    again: Cut
    step_after_border: int

    @property
    def border(self) -> int:
        return self.again.start


def plan_trial(page_size: int, window: int, most_tokens: int) -> CheckTrial:
    """Plan for the longest `window`.

    Tokens take time, so with a window longer than `most_tokens` the sequence `a` stays inside it.
    """
    border = -(-_LEAST_BORDER // page_size) * page_size
    before, after = (33, 5, border - 45, 7), (65, 4)
    rest = max(4, min(window + _AFTER_A_WINDOW, most_tokens) - border - sum(after))
    together = {
        "a": Cut((*before, *after, rest)),
        "whole": Cut((min(_LONGEST_SCAN + 8, most_tokens), 1, 3)),
        "mixed": Cut((1, 5, 1, 1, 66, 1, 2, 1)),
        "first": Cut((40,)),
        "second": Cut((17, 1, 1), first_step=1),
    }
    return CheckTrial(together, Cut((2, 64, 1, rest + 2), start=border), len(before))


# The logits after a token may differ by so much: the root mean square error relative to theirs. A
# definition's formulas for chunks and for single tokens may differ by more than rounding (Nemotron-H and
# Zamba2 clamp dt in one).
_TOLERANCE, _TOLERANCE_AFTER_SINGLES = 1e-4, 5e-3
# The first holds in half precision where nothing else is tried, the second where float32 has passed.
OF_HALF, OF_ALSO_HALF = 0.12, 0.4
# The plain pass rounds K and V to float8_e4m3fn, too, but numbers near a border may be rounded the other way.
OF_FLOAT8_KV = 0.05
# A control's error must be so many times the right run's, or the check is blind. Then the right run's error
# may be no larger than any model's rounding: Jamba's state, with its initial weights, hardly affects the
# result.
_SEEN_BY, _SEEN_BY_HALF, _PLAIN_ROUNDING = 100, 2, 2e-5
ROWS, _FEWEST_ROWS = 8, 3  # So many rows are compared after a border.


@dataclass(frozen=True, slots=True)
class CheckedRow:
    position: int
    error: float
    begins: bool  # The row is the first of a chunk.
    after_singles: bool


@dataclass
class Findings:
    """These are the errors of packed steps.

    An error is the largest median of the rows that follow a border of chunks.
    """

    half_tolerance: float | None  # This is None in float32.
    error: float = 0.0
    error_after_singles: float = 0.0
    controls: dict[str, float] = field(default_factory=dict)
    fault: str = ""

    def add(self, what: str, rows: Sequence[CheckedRow]) -> None:
        for row, error in _medians(rows):
            self._add(f"{what} from token {row.position} on", error, row.after_singles)

    def _add(self, where: str, error: float, after_singles: bool) -> None:
        tolerance = _TOLERANCE_AFTER_SINGLES if after_singles else _TOLERANCE
        tolerance = self.half_tolerance or tolerance
        if after_singles:
            self.error_after_singles = max(self.error_after_singles, error)
        else:
            self.error = max(self.error, error)
        if not error <= tolerance and not self.fault:  # NaN is a fault, too.
            self.fault = (
                f"computed in pieces it is another model: its logits are off by {error:.1e} of their size "
                f"({where}), where rounding explains {tolerance:.0e}"
            )

    def lose(self, lost: str, rows: Sequence[CheckedRow]) -> None:
        self.controls[lost] = error = max(error for _, error in _medians(rows))
        if lost in self.blind_to and self.error > _PLAIN_ROUNDING and not (self.half_tolerance or self.fault):
            self.fault = (
                f"computed in pieces its logits are off by {self.error:.1e} of their size, and by no more "
                f"than {error:.1e} without the {lost}: whether it goes on from that cannot be told"
            )

    @property
    def blind_to(self) -> list[str]:
        right = max(self.error, self.error_after_singles)
        seen_by = _SEEN_BY_HALF if self.half_tolerance else _SEEN_BY
        return [lost for lost, error in self.controls.items() if not error >= seen_by * right]


def _medians(rows: Sequence[CheckedRow]) -> Iterator[tuple[CheckedRow, float]]:
    """Yield the median error of the rows from each border on.

    Too few rows show nothing, since one of them may have had a tie.
    """
    for i, row in enumerate(rows):
        following = [other.error for other in rows[i : i + ROWS]]
        if row.begins and len(following) >= _FEWEST_ROWS:
            yield row, median(following)
