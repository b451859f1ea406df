"""A simulated rank goes on computing at the real checkpoints, of a state each, in a pool of so many.

A rank keeps them at the borders that ours are kept at, but cuts no chunk for it. Of an answer the trace does
not say which blocks it becomes: its end is stood in for by the prompt's last border, where it passed one.
"""

from collections.abc import Sequence

from services.kv.checkpoints import Checkpoints, SavedPoint, borders_to_keep
from services.kv.prefix_cache import PrefixCache, SequencePages
from services.kv.radix_tree import Node
from services.values.kv import BlockHash

_STRIDE_BLOCKS = 32  # as many as eight chunks of the engine's have, where a block is a page


class Resuming:
    """It works over one rank's cache, in blocks. With no states it goes on wherever it holds."""

    def __init__(self, num_states: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.num_states = num_states
        self._points = Checkpoints(drop=lambda point: None)
        self.forget = self._points.forget

    def would_begin(self, node: Node | None, matched: int, num_blocks: int) -> int:
        """Blocks of a prompt of `num_blocks` that are not computed where `matched` are held, to `node`."""
        if not self.num_states:
            return matched
        point = self._points.deepest(_before_the_end(node, num_blocks))
        return point.position if point is not None else 0

    def begin(self, pages: SequencePages, num_blocks: int) -> int:
        if not self.num_states:
            return pages.prefix_len
        point = self._points.use(_before_the_end(pages.node, num_blocks))
        return point.position if point is not None else 0

    def borders(self, resumed: int, matched: int, num_blocks: int) -> Sequence[int]:
        return borders_to_keep(resumed, matched, num_blocks, 1, _STRIDE_BLOCKS) if self.num_states else ()

    def keep(self, cache: PrefixCache, pages: SequencePages, border: int) -> None:
        node = cache.node_at(pages, border)
        if node is not None:
            self._points.keep(node, SavedPoint(border, None, ()), 1)
            if len(self._points) > self.num_states:
                self._points.evict()

    def keep_for_answer(
        self, cache: PrefixCache, pages: SequencePages, prompt_tokens: int, output_tokens: int
    ) -> None:
        last = (prompt_tokens - 1) // self._block_tokens
        if self.num_states and prompt_tokens + output_tokens > (last + 1) * self._block_tokens:
            self.keep(cache, pages, last)

    def take_events(self) -> tuple[tuple[BlockHash, ...], tuple[BlockHash, ...]]:
        return self._points.events.take()


def _before_the_end(node: Node | None, num_blocks: int) -> Node | None:
    """The last block is computed in any case."""
    while node is not None and node.depth >= num_blocks:
        node = node.parent
    return node
