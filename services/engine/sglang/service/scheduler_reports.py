"""This module converts the radix-tree events and the load that a scheduler of SGLang's reports. It is pure.

BlockStored(hashes, parent, token_ids) gives one node per page, with its tokens and its parent. A node at the
end of an index block reports `stored`: the block's sequence hash, chained from the root. BlockRemoved(hashes)
reports `removed` when the last such node of the block goes. AllBlocksCleared reports `cleared`. An unreadable
event is counted, and reported as `cleared`, since nothing known is certain any more.

SGLang's hashes are only names here; ours are computed from token ids and parents. A tree whose keys are pairs
of neighbouring tokens (with EAGLE) is represented by the first token of each pair. It finds a page only with
the token after it, so a predicted hit may be one page too long, and pages that differ in that token alone are
one block.

Of the load (managers/load_snapshot.py) this has what routers need.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.kv.block_hash import BlockLedger, extend_hash, scope_seed
from services.values.errors import ProtocolError
from services.values.kv import BlockHash, CacheEvents, PageBooks
from services.values.rank import Role
from services.values.rank_reports import NO_STEPS, RankLoad, StepHistogram

# These are values of sglang.srt.disaggregation.kv_events.StorageMedium: the device's own pages, or not
# stated.
_OUR_TIER = ("GPU", None)
_MAX_KINDS = 16  # The kinds are texts of errors, which may contain values.


@dataclass(frozen=True, slots=True)
class _Node:
    block: BlockHash | None  # This is the sequence hash of the last full index block up to here.
    open_tokens: tuple[int, ...]  # These follow that block's end.
    seed: int


class TreeEventRebuilder:
    """Each DP rank has one. It needs memory for a node per page of the tree."""

    def __init__(self, model: str, page_size: int, index_block: int) -> None:
        if index_block % page_size:
            raise ValueError(f"index block {index_block} is no multiple of page size {page_size}")
        self._model = model
        self._page_size = page_size
        self._index_block = index_block
        self._nodes: dict[int, _Node] = {}
        # Several pages may end one block where keys are pairs.
        self._num_pages_of: Counter[BlockHash] = Counter()
        self._untaken = BlockLedger()
        self._cleared = False  # Earlier events are no longer valid.
        self.unreadable: Counter[str] = Counter()  # It counts unreadable events by kind.

    def __repr__(self) -> str:
        return f"TreeEventRebuilder(pages={len(self._nodes)} unreadable={self.unreadable.total()})"

    @property
    def num_pages(self) -> int:
        return len(self._nodes)

    def rebuild(self, events: Iterable[Mapping[str, Any]]) -> CacheEvents:
        """Return the meaning of one batch of SGLang's events. It never raises.

        After an unreadable event only blocks that are stored later, from the root on, count as held.
        """
        for event in events:
            try:
                self._read(event)
            except Exception as error:  # The content comes from another program, so any error is possible.
                self._count(str(error) if isinstance(error, ProtocolError) else repr(error))
                self._forget()
        return self._take()

    def forget(self, kind: str) -> CacheEvents:
        self._count(kind)
        self._forget()
        return self._take()

    def _take(self) -> CacheEvents:
        cleared, self._cleared = self._cleared, False
        return CacheEvents(*self._untaken.take(), cleared)

    def _count(self, kind: str) -> None:
        known = kind in self.unreadable or len(self.unreadable) < _MAX_KINDS
        self.unreadable[kind if known else "others"] += 1

    def _forget(self) -> None:
        if self._num_pages_of:  # Otherwise no reported block is valid anyway.
            self._clear()
        self._nodes.clear()

    def _read(self, event: Mapping[str, Any]) -> None:
        if event.get("medium") not in _OUR_TIER:
            return  # It is not about our pages.
        match event["type"]:
            case "BlockStored":
                self._check(event)
                self._store(event)
            case "BlockRemoved":
                for name in event["block_hashes"]:
                    self._remove(name)
            case "AllBlocksCleared":
                self._clear()
            case other:
                raise ProtocolError(f"events of type {other} are not known")

    def _clear(self) -> None:
        self._nodes.clear()
        self._num_pages_of.clear()
        self._untaken.take()
        self._cleared = True

    def _check(self, event: Mapping[str, Any]) -> None:
        if event["block_size"] != self._page_size:
            raise ProtocolError(f"pages have {event['block_size']} tokens, not {self._page_size}")
        if len(event["token_ids"]) != len(event["block_hashes"]) * self._page_size:
            raise ProtocolError("pages and tokens are not of one number")

    def _store(self, event: Mapping[str, Any]) -> None:
        tokens = _tokens(event["token_ids"])
        node = self._parent(event)
        if node is None:
            return  # Its parent page was never reported, so its hash cannot be known.
        for number, name in enumerate(event["block_hashes"]):
            page = tokens[number * self._page_size : (number + 1) * self._page_size]
            node = self._child(node, page)
            if self._nodes.get(name) == node:
                continue
            self._remove(name)  # Its name belonged to another block.
            self._nodes[name] = node
            if not node.open_tokens:
                assert node.block is not None
                self._num_pages_of[node.block] += 1
                if self._num_pages_of[node.block] == 1:
                    self._untaken.note(node.block, stored=True)

    def _parent(self, event: Mapping[str, Any]) -> _Node | None:
        parent = event.get("parent_block_hash")
        if parent is not None:
            return self._nodes.get(parent)
        return _Node(None, (), scope_seed(self._model, event.get("cache_salt") or ""))

    def _child(self, parent: _Node, page: Sequence[int]) -> _Node:
        tokens = (*parent.open_tokens, *page)
        if len(tokens) < self._index_block:
            return _Node(parent.block, tokens, parent.seed)
        return _Node(extend_hash(parent.block, tokens, parent.seed), (), parent.seed)

    def _remove(self, name: int) -> None:
        node = self._nodes.pop(name, None)
        if node is not None and not node.open_tokens and node.block is not None:
            self._num_pages_of[node.block] -= 1
            if not self._num_pages_of[node.block]:
                del self._num_pages_of[node.block]
                self._untaken.note(node.block, stored=False)


def _tokens(keys: Sequence[Any]) -> list[int]:
    """Return the tokens of a page's keys, of pairs the first ones. Raises ProtocolError for other keys."""
    pairs = [key for key in keys if isinstance(key, Sequence)]
    if not pairs:
        return list(keys)
    if len(pairs) != len(keys):
        raise ProtocolError(f"{len(pairs)} of a page's {len(keys)} keys are pairs")
    firsts, seconds = map(list, zip(*pairs, strict=True))
    if firsts[1:] != seconds[:-1]:
        raise ProtocolError("pairs are not of neighbours")
    return firsts


Load = Mapping[str, Any]
_PACE = 0.2  # This is the pace of the exponential average.


def num_pages(load: Load, page_size: int) -> int:
    """Return the pages of the rank's pool; 0 before its scheduler has reported anything."""
    return int(load.get("max_total_num_tokens", 0)) // page_size


def waiting(load: Load, role: Role) -> int:
    """Return how many requests wait for pages.

    On decode SGLang's own number includes those that have pages and wait for prefill, which is not this
    rank's time.
    """
    if role is Role.PREFILL:
        return int(load.get("num_waiting_reqs", 0))
    queues = load.get("disaggregation", {})
    names = ("decode_prealloc_queue_reqs", "decode_retracted_queue_reqs")
    return sum(int(queues.get(name, 0)) for name in names)


def rank_load(load: Load, role: Role, page_size: int, pool_pages: int) -> RankLoad:
    """Return the rank's load, before its reports with `pool_pages`; evictable pages count as free."""
    total = num_pages(load, page_size) or pool_pages
    used_tokens = int(load.get("num_used_tokens", 0))
    used = min(total, -(-used_tokens // page_size))
    waits = waiting(load, role)
    # Requests that wait on a decode rank wait for room, as it computes no prompts. SGLang counts whole
    # prompts there, including the cached part.
    uncached = int(load.get("num_waiting_uncached_tokens", 0))
    without_pages = max(0, int(load.get("num_total_tokens", 0)) - used_tokens)
    with_pages = 0 if role is Role.PREFILL else int(load.get("num_waiting_reqs", 0)) - waits
    return RankLoad(
        running=int(load.get("num_running_reqs", 0)) + max(0, with_pages),
        waiting=waits,
        pending_tokens=uncached if role is Role.PREFILL else 0,
        waiting_tokens=uncached if role is Role.PREFILL else without_pages,
        books=PageBooks(total, total - used, 0, 0, used, 0),
        prefill_tokens_per_s=_prefill_rate(load),
    )


def _prefill_rate(load: Load) -> float:
    busy_us = int(load.get("total_prefill_busy_us", 0) or 0)
    return int(load.get("total_prefill_uncached_tokens", 0)) * 1e6 / busy_us if busy_us else 0.0


class MeanStepTimes:
    """This keeps step times while a rank is idle, as routers need the cost of one more sequence there."""

    def __init__(self) -> None:
        self._totals: dict[int, tuple[float, float]] = {}  # The values are steps and microseconds.
        self._averages_s: dict[int, float] = {}
        self._histograms: dict[int, StepHistogram] = {}

    def note(self, dp_rank: int, moments: Sequence[float] | None) -> None:
        """Add SGLang's running totals.

        `moments` are, since the rank's start and over all decode steps, their number, the sum of their batch
        sizes, of their microseconds and more; None before the first (sglang.srt.managers.load_snapshot).
        """
        if not moments:
            return
        before = self._totals.get(dp_rank, (0.0, 0.0))
        steps, total_us = self._totals[dp_rank] = float(moments[0]), float(moments[2])
        if steps > before[0]:
            sample_s = (total_us - before[1]) / (steps - before[0]) / 1e6
            average_s = self._averages_s.get(dp_rank, sample_s)
            self._averages_s[dp_rank] = average_s + _PACE * (sample_s - average_s)
            known = self._histograms.get(dp_rank, NO_STEPS)
            self._histograms[dp_rank] = known.with_steps(sample_s, int(steps - before[0]))

    def step_s(self, dp_rank: int) -> float:
        """Return the average in seconds; 0 before the first step."""
        return self._averages_s.get(dp_rank, 0.0)

    def histogram(self, dp_rank: int) -> StepHistogram:
        """Return all steps since the start; between two reports only their mean is known."""
        return self._histograms.get(dp_rank, NO_STEPS)
