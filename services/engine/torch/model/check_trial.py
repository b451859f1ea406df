"""The self-check cuts random sequences into steps so, and its findings say whether the model may be served.

a        chunks alone, the first shorter than a scan's, none of its ends a multiple of 64 but `border`; it
         goes further than windows reach
whole    one chunk longer than a scan's, then single tokens
mixed    a prompt of one token; single tokens between chunks, so that each form goes on from the other's state
first    ends soon
second   begins in the slot that `first` had
again    goes on at a's border from a copy of its state, cut otherwise, when a has gone on

This module is pure.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

# Mamba-2 scans 128 or 256 tokens at a time, delta nets 64.
_LONGEST_SCAN = 256
_LEAST_BORDER = 112
_AFTER_A_WINDOW = 40


@dataclass(frozen=True, slots=True)
class Cut:
    """A sequence is cut by the lengths of its chunks.

    They are computed in steps first_step, first_step + 1, ...
    """

    lengths: tuple[int, ...]
    start: int = 0  # tokens that another one has computed
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
class Trial:
    together: Mapping[str, Cut]
    again: Cut
    step_after_border: int

    @property
    def border(self) -> int:
        return self.again.start


def plan_trial(page_size: int, window: int, most_tokens: int) -> Trial:
    """Plan for the longest `window`.

    Where that is longer than `most_tokens`, which takes time, a falls short.
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
    return Trial(together, Cut((2, 64, 1, rest + 2), start=border), len(before))


# The logits after a token may be off by so much: root mean square, as a share of theirs. A definition's
# formulas for chunks and for single tokens may differ by more than rounding (Nemotron-H and Zamba2 clamp dt
# in one).
_TOLERANCE, _TOLERANCE_AFTER_SINGLES = 1e-4, 5e-3
# In half precision these hold where nothing else is tried, and where float32 has passed.
OF_HALF, OF_ALSO_HALF = 0.12, 0.4
# The plain pass rounds K and V to float8_e4m3fn, too; some number near a border is rounded the other way.
OF_FLOAT8_KV = 0.05
# A control is off by that many times what the right run is, or the check is blind. Then the right run may be
# off by no more than rounding of any model: Jamba's state, with weights as they are made, hardly counts.
_SEEN_BY, _SEEN_BY_HALF, _PLAIN_ROUNDING = 100, 2, 2e-5
ROWS, _FEWEST_ROWS = 8, 3  # so many are compared after a border


@dataclass(frozen=True, slots=True)
class CheckedRow:
    position: int
    error: float
    begins: bool  # it is a chunk's first one
    after_singles: bool


@dataclass
class Findings:
    """They tell how far packed steps are off.

    That is the largest median of the rows that follow a border of chunks.
    """

    half_tolerance: float | None  # None: in float32
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
        if not error <= tolerance and not self.fault:  # NaN is a fault, too
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
    """Yield the median of the rows from each border on.

    Too few rows tell nothing: one of them may have met a tie.
    """
    for i, row in enumerate(rows):
        following = [other.error for other in rows[i : i + ROWS]]
        if row.begins and len(following) >= _FEWEST_ROWS:
            yield row, median(following)
