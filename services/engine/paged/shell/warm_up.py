"""The engine runs some steps for nobody before its rank serves. They make the device set up what it sets up
lazily (kernels, workspaces), and they make the start fail, instead of the first client, where a prompt chunk
of full size does not fit into memory:

    a chunk      the first of a prompt
    a token      after it
    drafts       after each, where there is a draft model
    a chunk      on a GPU: the last of the longest possible prompt, after pages that are still zero

(The memory that many sequences need beside it is not tried.) On a CPU the last chunk is left out: there it
takes as long as a client's, up to minutes, sets nothing up, and cannot fail, because a CPU allocates more
memory than it has. The pages are allocated like any others and given back; nothing is published.
"""

from services.engine.paged.model_runner import Chunk, ModelRunner, TailPages
from services.engine.start_fault import start_fault
from services.kv.carried_cache import CarriedCache, SequenceCarried
from services.kv.prefix_cache import PrefixCache, SequencePages
from services.values.request import SamplingParams

_GREEDY = SamplingParams(temperature=0)
_DRAFTS = 2  # One draft follows the chunk, and one a single token.


def warm_up(runner: ModelRunner, cache: PrefixCache, carried: CarriedCache, chunk_size: int) -> None:
    """Compute a chunk as long as the pool and a step allow, and a token.

    Raises:
        ConfigError: the runner cannot compute them.
        Unavailable: it cannot do so now: memory is short, or the device is lost.
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
