"""Prompts that are still to be computed may begin alike. The first of them is computed, and the others find
what they have in common with it. So a load report says how many of the pending tokens that spares.

A prompt is compared in blocks, with all that came before it and are still to be computed.
"""

from collections.abc import Callable, Iterable
from itertools import takewhile

from services.engine.paged.sequence import Phase, Sequence
from services.engine.paged.waiting_queue import tenant_of
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
        self._pending: dict[Sequence, list[BlockHash]] = {}
        self._holders: dict[BlockHash, dict[Sequence, None]] = {}  # They are in the order in which they came.

    def came(self, seq: Sequence) -> None:
        """Note how much of a sequence is to be computed, and how much of that prompts bring that came before
        it. It may have come before, and been sent back."""
        self.left(seq)
        self._estimate(seq)
        seq.in_common = 0
        if not self._is_on or seq.uncomputed_tokens < _LEAST_TOKENS or len(seq.ids) < self._block:
            return
        hashes = sequence_hashes(seq.ids, self._block, scope_seed("", seq.request.kv_scope))
        self._pending[seq] = hashes
        for block in hashes:
            self._holders.setdefault(block, {})[seq] = None
        seq.in_common = self._brought(seq)

    def left(self, seq: Sequence) -> None:
        """Note that it has been computed, or has ended. Nothing happens if it did not count."""
        if (hashes := self._pending.pop(seq, None)) is None:
            return
        later: list[Sequence] = []
        if seq.computed < len(hashes) * self._block:  # Nobody finds the rest of it.
            alike = reversed(self._holders[hashes[0]])
            later = list(takewhile(lambda other: other is not seq, alike))
        for block in hashes:
            holders = self._holders[block]
            del holders[seq]
            if not holders:
                del self._holders[block]
        for other in later:
            if self._brings(other, other.in_common // self._block):
                continue
            other.in_common = self._brought(other)
            if other.phase is Phase.WAITING:  # What was computed meanwhile is in the tree.
                self._estimate(other)

    def awaits(self, seq: Sequence) -> bool:
        """Return whether a prompt of its tenant that came before computes now, and has yet to compute, what
        this one lacks.

        Otherwise a prompt that is short but for that would compute the other's before its turn. Where the
        other is past it and has left no checkpoint there, nothing comes of waiting.
        """
        if seq.computed >= seq.in_common or (hashes := self._pending.get(seq)) is None:
            return False
        first = next(iter(self._holders[hashes[seq.in_common // self._block - 1]]))
        is_of_one_line = first.request.priority == seq.request.priority and tenant_of(first) == tenant_of(seq)
        is_at_it = first.phase is Phase.COMPUTING and first.computed < seq.in_common
        return first is not seq and is_at_it and is_of_one_line

    def tokens(self, waiting: Iterable[Sequence], active: Iterable[Sequence]) -> int:
        """Return how many of the tokens that these sequences have to compute others bring."""
        if not self._pending:
            return 0
        brought = [seq.in_common - len(seq.ids) + seq.uncomputed_tokens for seq in waiting if seq.in_common]
        computing = (seq for seq in active if seq.in_common and seq.phase is Phase.COMPUTING)
        brought += [seq.in_common - seq.computed for seq in computing]
        return sum([tokens for tokens in brought if tokens > 0])

    def _brought(self, seq: Sequence) -> int:
        """Return how many of its first tokens others bring. Whoever has a block has all before it."""
        # The last token is computed in any case, and so is what its scores need.
        low, high = 0, min(len(seq.ids) - 1, seq.scorable_from) // self._block
        while low < high:
            middle = (low + high + 1) // 2
            if self._brings(seq, middle):
                low = middle
            else:
                high = middle - 1
        return low * self._block

    def _brings(self, seq: Sequence, num_blocks: int) -> bool:
        """Return whether a sequence that came before this one has so many of its first blocks."""
        if num_blocks == 0:
            return True
        return next(iter(self._holders[self._pending[seq][num_blocks - 1]])) is not seq
