"""A first step for nobody, before the rank serves.

What a device sets up lazily (kernels, workspaces) is set up now, and a prompt chunk of full size that does
not fit into memory fails the start instead of the first client. (What a long context and many sequences
beside it take on top is not tried.) Its pages are lent like any other's and given back; nothing is published.
"""

from services.engine.paged.runner import Chunk, ModelRunner
from services.errors import ConfigError
from services.kv.prefix_cache import PrefixCache
from services.request import SamplingParams

_GREEDY = SamplingParams(temperature=0)


def warm_up(runner: ModelRunner, cache: PrefixCache, chunk_size: int) -> None:
    """Compute a prompt of one chunk, as long as a step may have and the pool holds, and a token after it.

    Raises:
        ConfigError: the runner cannot.
    """
    page_size = runner.layout.page_size
    context = min(runner.max_context_tokens, cache.num_pages * page_size)
    prompt_len = min(chunk_size, context - 1)
    if prompt_len < 1:
        return
    borrowed = cache.open((), "")
    try:
        cache.extend(borrowed, -(-(prompt_len + 1) // page_size))
        ids = [0] * (prompt_len + 1)
        for start, end in ((0, prompt_len), (prompt_len, prompt_len + 1)):
            pages = borrowed.pages[: -(-end // page_size)]
            runner.run([Chunk(ids[start:end], start, pages, True, _GREEDY, history=ids[:end])])
    except RuntimeError as error:
        raise ConfigError(f"the engine cannot compute {prompt_len} tokens in a step: {error}") from error
    finally:
        cache.close(borrowed)
