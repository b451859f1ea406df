"""Prompts that are still to be computed may begin alike. The first of them is computed, and the others find
what they have in common with it. So a load report says how many of the pending tokens that spares.

A prompt is compared in blocks, with all that came before it and are still to be computed.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from services.engine.paged.sequence import Phase, Sequence
from services.kv.block_hash import scope_seed, sequence_hashes
from services.kv.prefix_cache import PrefixCache
from services.values.kv import BlockHash

_LEAST_TOKENS = 512  # A prompt of which fewer are to be computed is left out: it delays nobody for long.
_BLOCK_TOKENS = 64


class InCommon:
    def __init__(self, cache: PrefixCache, estimate: Callable[[Sequence], None]) -> None:
        """`estimate` notes in a sequence how much of it is to be computed."""
        self._block = -(-_BLOCK_TOKENS // cache.page_size) * cache.page_size
        self._is_on = cache.enabled
        self._estimate = estimate
        self._pending: dict[Sequence, list[BlockHash]] = {}  # They are in the order in which they came.
        self._counts: Counter[BlockHash] = Counter()

    def came(self, seq: Sequence) -> None:
        """Note how much of a sequence is to be computed, and how much of that prompts bring that came before
        it. It may have come before, and been sent back."""
        self.left(seq)
        self._estimate(seq)
        seq.in_common = 0
        if self._is_on and seq.uncomputed_tokens >= _LEAST_TOKENS:
            self._compare(seq)

    def _compare(self, seq: Sequence) -> None:
        hashes = sequence_hashes(seq.ids, self._block, scope_seed("", seq.request.kv_scope))
        # The last token is computed in any case.
        seq.in_common = self._depth(hashes[: (len(seq.ids) - 1) // self._block]) * self._block
        self._pending[seq] = hashes
        self._counts.update(hashes)

    def left(self, seq: Sequence) -> None:
        """Note that it has been computed, or has ended. Nothing happens if it did not count."""
        if (hashes := self._pending.pop(seq, None)) is None:
            return
        self._remove(hashes)
        if seq.computed < len(hashes) * self._block:  # Nobody finds the rest of it.
            alike = [other for other, its in self._pending.items() if its[:1] == hashes[:1]]
            for other in alike:
                self._remove(self._pending.pop(other))
            for other in alike:
                if other.phase is Phase.WAITING:  # What was computed meanwhile is in the tree.
                    self._estimate(other)
                self._compare(other)

    def tokens(self, waiting: Iterable[Sequence], active: Iterable[Sequence]) -> int:
        """Return how many of the tokens that these sequences have to compute others bring."""
        if not self._pending:
            return 0
        has = [(seq, len(seq.ids) - seq.uncomputed_tokens) for seq in waiting if seq.in_common]
        has += [(seq, seq.computed) for seq in active if seq.in_common and seq.phase is Phase.COMPUTING]
        return sum(max(0, seq.in_common - tokens) for seq, tokens in has)

    def _depth(self, hashes: list[BlockHash]) -> int:
        """Return how many of the first blocks others have. Whoever has one has all before it."""
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if self._counts[hashes[middle - 1]]:
                low = middle
            else:
                high = middle - 1
        return low

    def _remove(self, hashes: list[BlockHash]) -> None:
        self._counts.subtract(hashes)
        for block in hashes:
            if not self._counts[block]:
                del self._counts[block]
