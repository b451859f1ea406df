"""The first steps are for nobody, before the rank serves.

What a device sets up lazily (kernels, workspaces) is set up now, and a prompt chunk of full size that does
not fit into memory fails the start instead of the first client:

    a chunk      the first of a prompt
    a token      after it
    drafts       after each, where there is a draft model
    a chunk      on a GPU: the last of the longest prompt there can be, after pages that are still zero

(What many sequences beside it take on top is not tried.) On a CPU the last one is left out: there it takes as
long as a client's does, up to minutes, sets nothing up, and cannot fail, for a CPU allocates more memory than
it has. Pages are allocated like any others and given back; nothing is published.
"""

from services.engine.paged.runner import Chunk, ModelRunner, TailPages
from services.engine.start_fault import start_fault
from services.kv.carried.carried_cache import CarriedCache, SequenceCarried
from services.kv.prefix_cache import PrefixCache, SequencePages
from services.values.request import SamplingParams

_GREEDY = SamplingParams(temperature=0)
_DRAFTS = 2  # It drafts one after the chunk, and one after a single token.


def warm_up(runner: ModelRunner, cache: PrefixCache, carried: CarriedCache, chunk_size: int) -> None:
    """Compute chunks as long as a step may have and the pool holds, and a token.

    Raises:
        ConfigError: the runner cannot.
        Unavailable: it cannot now: memory is short, or the device is lost.
    """
    longest = min(runner.max_context_tokens, cache.num_pages * runner.layout.page_size) - 1
    chunk_len = min(chunk_size, longest)
    if chunk_len < 1:
        return
    spans = [(0, chunk_len), (chunk_len, chunk_len + 1)]
    if runner.memory.kind == "VRAM" and longest > chunk_len:
        spans.append((longest - chunk_len, longest))
    borrowed, tails = cache.open((), ""), carried.resume(None, 0)
    try:
        for start, end in spans:
            _compute(runner, _chunk(cache, carried, borrowed, tails, start, end))
    finally:
        carried.close(tails)
        cache.close(borrowed)


def _chunk(
    cache: PrefixCache,
    carried: CarriedCache,
    borrowed: SequencePages,
    seq: SequenceCarried,
    start: int,
    end: int,
) -> Chunk:
    num_pages = -(-end // cache.page_size)
    if num_pages > len(borrowed.pages):
        cache.extend(borrowed, num_pages - len(borrowed.pages))
    carried.skip(seq, start)
    carried.extend(seq, end)
    tails = tuple(TailPages(tail.first_page, tail.pages) for tail in seq.tails)
    pages, ids = borrowed.pages[:num_pages], [0] * end
    return Chunk(ids[start:], start, pages, True, _GREEDY, history=ids, tails=tails, slot=seq.slot)


def _compute(runner: ModelRunner, chunk: Chunk) -> None:
    start, end = chunk.start, chunk.end
    try:
        runner.run([chunk])
        if runner.draft is not None:
            runner.draft.propose([chunk], [_DRAFTS])
    except RuntimeError as error:
        after = f" after {start} others" if start else ""
        raise start_fault(
            f"the engine cannot compute {end - start} tokens{after} in a step: {error} "
            "(where memory is short: a smaller --chunk-size, fewer --kv-pages)",
            error,
        ) from error
