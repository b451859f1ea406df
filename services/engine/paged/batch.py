"""What sequences contribute to a step. Reads them, changes nothing."""

from services.engine.paged.runner import Chunk, TailPages
from services.engine.paged.sequence import Sequence


def chunk_of(seq: Sequence, size: int, page_size: int) -> Chunk:
    """Its next `size` tokens."""
    assert seq.pages is not None and seq.carried is not None
    end = seq.computed + size
    last = end == len(seq.ids)
    return Chunk(
        token_ids=seq.ids[seq.computed : end],
        start=seq.computed,
        pages=seq.pages.pages[: -(-end // page_size)],
        sample=last,
        sampling=seq.request.sampling,
        history=seq.ids if last else (),
        num_output_ids=seq.num_output if last else 0,
        eos_token_ids=seq.request.eos_token_ids,
        store_from=seq.stored,
        tails=tuple(TailPages(tail.first_page, tail.pages) for tail in seq.carried.tails),
        slot=seq.carried.slot,
    )


def lacks_slot(seq: Sequence, page_size: int) -> bool:
    """Whether its newest token has no place in its pages yet."""
    assert seq.pages is not None
    return len(seq.pages.pages) * page_size < len(seq.ids)


def computes_towards(other: Sequence, seq: Sequence) -> bool:
    """Whether `other`, who computes as well, will keep a resume point that saves `seq` what is before it."""
    border = next((border for border in reversed(other.borders) if border < len(seq.ids)), 0)
    return border > seq.computed and seq.ids[:border] == other.ids[:border]


def computes_next_page_of(other: Sequence, seq: Sequence, page_size: int) -> bool:
    """Whether `other`, who computes as well, is at the page that `seq` needs next and will fill it.

    Then `seq` can have it from the tree soon. Both hold the same path of the tree, or they are not at
    the same page of the same prefix.
    """
    assert seq.pages is not None and other.pages is not None
    if seq.pages.node is None or seq.pages.node is not other.pages.node:
        return False
    first = seq.pages.num_published * page_size
    end = first + page_size
    if end > min(len(seq.ids) - 1, len(other.ids)):
        return False
    return seq.ids[first:end] == other.ids[first:end]
