"""A sequence's computing is cut into scans, and at borders of which it keeps a checkpoint. This is pure."""

from collections.abc import Iterator, Sequence
from math import gcd

_MOST_SCANNED = 64  # Delta nets scan as many tokens, and Mamba-2 takes longer with more.


def scan_tokens(index_block: int) -> int:
    """Return how many tokens of a prompt recurrent layers compute at once: from a multiple of it to the next.

    The length of a scan decides how it rounds. So it must follow from the prompt: neither from what else a
    step computes, nor from where the sequence went on, which is a border of the index.
    """
    return gcd(index_block, _MOST_SCANNED)


def scans(start: int, end: int, tokens: int) -> Iterator[range]:
    """Cut [start, end) at multiples of `tokens`."""
    while start < end:
        border = min(end, (start // tokens + 1) * tokens)
        yield range(start, border)
        start = border


def borders_to_keep(resumed: int, matched: int, num_tokens: int, block: int, stride: int) -> list[int]:
    """Return ascending positions, all beyond `resumed`:

    the last border of the ids     the next turn of the conversation goes on from there
    where `matched` ends           another prompt has branched off there, and a third one may
    about every `stride` tokens    a long prompt is not computed from its start by who shares half of it
    """
    last, stride = (num_tokens - 1) // block * block, -(-stride // block) * block
    borders = {last, *range(stride, last, stride)}
    if matched > resumed:
        borders.add(matched // block * block)
    return sorted(border for border in borders if border > resumed)


def shared_border(ids: Sequence[int], other: Sequence[int], block: int, known: int = 0) -> int:
    """Return the last border up to which both are the same, and after which each has at least one more id.

    Up to the border `known` they are known to be.
    """
    end = (min(len(ids), len(other)) - 1) // block * block
    border = known
    while border < end and ids[border : border + block] == other[border : border + block]:
        border += block
    return border
