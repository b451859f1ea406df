"""These functions tell what sequences contribute to a step; they read sequences and change nothing."""

from collections.abc import Sequence as SequenceOf

from services.engine.paged.model_runner import Chunk, TailPages
from services.engine.paged.sequence import Sequence
from services.kv.carried_cache import Tail

Ids = SequenceOf[int]


def chunk_of(seq: Sequence, size: int, page_size: int, drafts: Ids = ()) -> Chunk:
    assert seq.pages is not None and seq.carried is not None
    start, pages = seq.computed, seq.pages.pages
    end = start + size
    last = end == len(seq.ids)
    carried, request, token_ids = seq.carried, seq.request, seq.ids[start:end]
    num_pages = -(-(end + len(drafts)) // page_size)
    return Chunk(
        token_ids=[*token_ids, *drafts] if drafts else token_ids,
        start=start,
        pages=pages if len(pages) == num_pages else pages[:num_pages],
        sample=last,
        sampling=request.sampling,
        history=seq.ids if last else (),
        num_output_ids=seq.num_output if last else 0,
        eos_token_ids=request.eos_token_ids,
        store_from=seq.stored,
        tails=_tail_pages(carried.tails) if carried.tails else (),
        slot=carried.slot,
        num_drafts=len(drafts),
        matcher=seq.matcher if last else None,
        generated=start >= len(request.prompt_ids),
        scoring=None if seq.scores is None else seq.scores.asked_of(start, end),
        adapter=request.adapter,
        table=seq.pages.table,
    )


def _tail_pages(tails: SequenceOf[Tail]) -> tuple[TailPages, ...]:
    return tuple(TailPages(tail.first_page, tail.pages) for tail in tails)


def most_drafts(seq: Sequence, max_context_tokens: int) -> int:
    left = max_context_tokens - len(seq.ids)
    max_tokens = seq.request.sampling.max_tokens
    if max_tokens is not None:
        left = min(left, max_tokens - seq.num_output)
    return max(0, left - 1)


def usable_drafts(seq: Sequence, ids: Ids, most: int, vocab_size: int) -> Ids:
    """Return the drafts before the first one that would end the sequence or break its constraint.

    Only the target model may choose an ending token, and nothing follows it.
    """
    ids = ids[:most]
    for index, token_id in enumerate(ids):
        if token_id in seq.ending_ids or not 0 <= token_id < vocab_size:
            ids = ids[:index]
            break
    return ids[: seq.matcher.num_drafts_fitting(ids)] if seq.matcher is not None and ids else ids


def lacks_slot(seq: Sequence, page_size: int) -> bool:
    assert seq.pages is not None
    return len(seq.pages.pages) * page_size < len(seq.ids)


def computes_towards(other: Sequence, seq: Sequence) -> bool:
    """Return whether `other`, which computes too, will keep a checkpoint that spares `seq` what is before
    it."""
    common = min(other.common.get(seq, 0), seq.scorable_from)
    return any(seq.computed < border <= common for border in other.borders)


def computes_next_page_of(other: Sequence, seq: Sequence, page_size: int) -> bool:
    """Return whether `other`, which computes too, is at the page that `seq` needs next and will fill it.

    `seq` can then soon get it from the tree. They are at the same page of the same prefix only if both hold
    the same path of the tree.
    """
    assert seq.pages is not None and other.pages is not None
    if seq.pages.node is None or seq.pages.node is not other.pages.node:
        return False
    first = seq.pages.num_published * page_size
    end = first + page_size
    if end > min(len(seq.ids) - 1, seq.scorable_from, len(other.ids)):
        return False
    return seq.ids[first:end] == other.ids[first:end]
