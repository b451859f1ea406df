"""The self-check cuts sequences of random tokens into steps so. This module is pure.

a        chunks alone, the first shorter than a scan's, none of its ends a multiple of 64 but `border`; it
         goes further than windows reach
whole    one chunk longer than a scan's, then single tokens
mixed    a prompt of one token; single tokens between chunks, so that each form goes on from the other's state
first    ends soon
second   begins in the slot that `first` had
again    goes on at a's border from a copy of its state, cut otherwise, when a has gone on
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

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
