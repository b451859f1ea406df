"""A small checkpoint drafts beside the runner's own; it is a DraftModel of engine/paged/model_runner.py.

prompt chunk: the draft model computes it after the target, if it has what precedes the chunk.
propose: the draft model first catches up on each sequence, then drafts one token of each per round.

A few missing tokens are computed one by one, in place. Many are computed in slices, one per call, and the
sequence gets no drafts in that call.

Drafts are sampled as the target would sample them: with the request's own temperature, filters and penalties,
and with the random number of the same position. Where the two distributions agree, so do the tokens.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median_low

import torch
from torch import Tensor

from services.engine.paged.model_runner import NO_TOKEN, Chunk
from services.engine.torch.checkpoint import Checkpoint, load_model, open_checkpoint
from services.engine.torch.draft_tokens import DraftedHistory
from services.engine.torch.model.kv_groups import whole_group
from services.engine.torch.model.packed_model import Computed, PackedModel
from services.engine.torch.model.self_check import check
from services.engine.torch.pools import KvDtype, Pools
from services.engine.torch.sampling.device_sampler import DeviceSampler, also_for
from services.engine.torch.sampling.torch_sampler import sample
from services.engine.torch.step_graphs import open_graphs
from services.kv.shadow_validity import ShadowValidity
from services.kv.tails import PoolSizes
from services.model.tokenizer_json import first_difference
from services.values.errors import ConfigError
from services.values.kv import DraftKv, PageId, PoolMemory
from services.values.request import SamplingParams

_GREEDY = SamplingParams(temperature=0)
# So many tokens of a sequence are computed one by one. A longer chunk first gathers its pages.
_ONE_BY_ONE = 8
# The time of a round is the median of the last ones: the first compiles kernels and takes 0.8 s, not 1 ms.
_TIMED_ROUNDS = 15


@dataclass(frozen=True, slots=True)
class DraftModelSettings:
    directory: Path
    # Also compute chunks of one token; a prefill rank needs that, as nobody decodes there.
    every_chunk: bool = False
    # So many tokens are caught up at most before a step's drafts, in addition to the prompt chunks.
    catch_up_tokens: int = 512
    scratch_pages: int = 64  # These pages hold drafts that reach past a sequence's pages.
    self_check: bool = True
    kv_dtype: KvDtype | None = None
    max_rows: int = 0  # CUDA graphs replay steps of up to so many single tokens.


@dataclass(slots=True)
class _Drafting:
    chunk: Chunk
    count: int
    pages: Sequence[PageId]  # The scratch pages come last.
    sampling: SamplingParams
    ids: list[int] = field(default_factory=list)

    @property
    def next_token(self) -> Chunk:
        position = self.chunk.end + len(self.ids) - 1
        return Chunk(self.ids[-1:], position, self.pages, False, _GREEDY, table=self.pages)

    @property
    def choosing(self) -> Chunk:
        return replace(
            self.chunk,
            sampling=self.sampling,
            history=DraftedHistory(self.chunk.history, tuple(self.ids)),
            num_output_ids=self.chunk.num_output_ids + len(self.ids),
        )


class TorchDraft:
    """This class implements DraftModel. It is made, called and closed on the runner's thread."""

    def __init__(
        self,
        settings: DraftModelSettings,
        target: Checkpoint,
        *,
        num_pages: int,
        page_size: int,
        device: torch.device,
        graph_budget: int = 0,
        sampler: DeviceSampler | None = None,
        fuses: bool = True,
    ) -> None:
        """Load the model in its own dtype, with a page for each of the target's pages.

        CUDA graphs take up to `graph_budget` bytes. With `fuses`, our own kernels compute some operations on
        a GPU.

        Raises ConfigError where it cannot draft for the target, and the message says why. Raises Unavailable
        where memory, the device or a file is missing now, so that another start may succeed.
        """
        self._settings = settings
        checkpoint = open_checkpoint(settings.directory)
        check_same_tokens(checkpoint, target)
        self._model = PackedModel(load_model(checkpoint, device), torch.get_num_threads(), fuses=fuses)
        try:
            probed = self._model.probed
            if probed.states:
                raise ConfigError("it has recurrent layers: their states are of one position")
            group = whole_group(probed.calls)
        except ConfigError as error:
            raise ConfigError(f"{checkpoint.directory} cannot draft: {error}") from error
        if settings.self_check:
            check(self._model, page_size, str(checkpoint.directory), settings.kv_dtype)
        self._model.pack(torch.get_num_threads())
        self._sampler = also_for(sampler, probed.logits_dtype)
        self._pools = Pools(
            probed,
            num_pages=num_pages + settings.scratch_pages,
            page_size=page_size,
            sizes=PoolSizes(),
            model_fingerprint=checkpoint.fingerprint,
            device=device,
            groups=(group,),
            kv_dtype=settings.kv_dtype,
        )
        self._graphs = open_graphs(self._model, self._pools, settings.max_rows, graph_budget)
        self._scratch = [PageId(num_pages + page) for page in range(settings.scratch_pages)]
        self._max_context_tokens = checkpoint.max_context_tokens
        self.validity = ShadowValidity(num_pages, page_size)
        self.memory: PoolMemory = replace(self._pools.memory[0], num_pages=num_pages)
        self._rounds_s = deque[float](maxlen=_TIMED_ROUNDS)

    @property
    def step_s(self) -> float:
        return median_low(self._rounds_s) if self._rounds_s else 0.0

    @property
    def kv(self) -> DraftKv:
        layout = self._pools.layout
        return DraftKv(layout.model_fingerprint, replace(layout.groups[0], unit_bytes=layout.page_bytes))

    def lent(self, pages: Sequence[PageId]) -> None:
        self.validity.lent(pages)

    def received(self, pages: Sequence[PageId], num_tokens: int) -> None:
        self.validity.received(pages, num_tokens)

    def held_tokens(self, pages: Sequence[PageId]) -> int:
        return self.validity.valid_len(pages)

    def read_pages(self, pages: Sequence[PageId]) -> Iterator[memoryview]:
        return self._pools.read(pages, 0)

    @property
    def units(self) -> Tensor:
        """Return the bytes of its pool, uint8 [num_pages, page_bytes]."""
        return self._pools.units[0]

    def compute_with(self, chunks: Sequence[Chunk]) -> None:
        lacking = [(chunk, self._lacking(chunk)) for chunk in chunks]
        own = [
            _part(chunk, span, chunk.token_ids[span.start - chunk.start : span.stop - chunk.start])
            for chunk, span in lacking
            if span
        ]
        if own:
            self._compute(own, ())
        for chunk, span in lacking:
            self.validity.computed(chunk.pages, span.start, span.stop)

    def propose(self, chunks: Sequence[Chunk], counts: Sequence[int]) -> list[tuple[int, ...]]:
        drafting = [
            self._drafting(nth, len(chunks), *each)
            for nth, each in enumerate(zip(chunks, counts, strict=True))
        ]
        with torch.inference_mode():
            self._draft([each for each in drafting if each.count > 0])
        for each in drafting:
            self.validity.foreseen(each.chunk.pages, each.chunk.end, each.ids[:-1])
        return [tuple(each.ids) for each in drafting]

    def close(self) -> None:
        self._graphs.close()
        self._pools.close()
        self._model.close()

    def _lacking(self, chunk: Chunk) -> range:
        decodes = len(chunk.token_ids) == 1 + chunk.num_drafts
        if decodes and not self._settings.every_chunk:
            return range(0)
        end = min(chunk.end, self._max_context_tokens)
        return self.validity.lacking(chunk.pages, chunk.start, end) if chunk.start < end else range(0)

    def _drafting(self, nth: int, of: int, chunk: Chunk, count: int) -> _Drafting:
        share = len(self._scratch) // of
        pages = [*chunk.pages, *self._scratch[nth * share : (nth + 1) * share]]
        room = min(len(pages) * self._pools.layout.page_size, self._max_context_tokens) - chunk.end
        return _Drafting(chunk, max(0, min(count, room)), pages, replace(chunk.sampling, logprobs=None))

    def _draft(self, drafting: Sequence[_Drafting]) -> None:
        sequences = [(each.chunk.pages, each.chunk.history) for each in drafting]
        spans = self.validity.to_compute(sequences, self._settings.catch_up_tokens)
        catches_up = any(len(span) > _ONE_BY_ONE for span in spans)
        began = time.perf_counter()
        going, computed = self._catch_up(drafting, spans)
        while going:
            assert computed is not None, "what goes on was computed"
            choosing = [each.choosing for each in going]
            choose = self._sampler or sample
            choices = choose(computed.logits, choosing, most_probable=computed.most_probable)
            # Bans may leave a row without a token to choose. It gets no more drafts.
            chosen = [(e, c.token_id) for e, c in zip(going, choices, strict=True) if c.token_id != NO_TOKEN]
            for each, token_id in chosen:
                each.ids.append(token_id)
            began, catches_up = self._note_round(began, catches_up), False
            going = [each for each, _ in chosen if len(each.ids) < each.count]
            if going:
                computed = self._compute([each.next_token for each in going], range(len(going)))

    def _note_round(self, began: float, catches_up: bool) -> float:
        ended = time.perf_counter()
        if not catches_up:
            self._rounds_s.append(ended - began)
        return ended

    def _catch_up(
        self, drafting: Sequence[_Drafting], spans: Sequence[range]
    ) -> tuple[list[_Drafting], Computed | None]:
        """Return the sequences that lack nothing now, and the logits after the newest token of each."""
        ready, rows, parts, end = list[_Drafting](), list[int](), list[Chunk](), 0
        for each, span in zip(drafting, spans, strict=True):
            if span:
                parts.append(_part(each.chunk, span, each.chunk.history[span.start : span.stop]))
                end += len(span)
            if span.stop == each.chunk.end:
                ready.append(each)
                rows.append(end - 1)
        computed = self._compute(parts, rows) if parts else None
        for each, span in zip(drafting, spans, strict=True):
            self.validity.computed(each.chunk.pages, span.start, span.stop)
        return ready, computed

    def _compute(self, chunks: Sequence[Chunk], rows: Sequence[int]) -> Computed:
        computed = self._graphs.compute(chunks, rows)
        return self._model.compute(self._pools, chunks, rows) if computed is None else computed


def check_same_tokens(draft: Checkpoint, target: Checkpoint) -> None:
    """Raise ConfigError unless each id is the same token in both, as far as their files show."""
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"{draft.directory} cannot draft: its vocabulary has {draft.vocab_size} ids, the model's "
            f"{target.vocab_size}"
        )
    ours, theirs = draft.tokenizer(), target.tokenizer()
    if ours and theirs and (differs := first_difference(ours, theirs)) is not None:
        raise ConfigError(f"{draft.directory} cannot draft: token {differs} is another one than the model's")


def _part(chunk: Chunk, span: range, ids: Sequence[int]) -> Chunk:
    few = 1 < len(span) <= _ONE_BY_ONE
    num_drafts = len(span) - 1 if few else 0  # The draft tokens of such a span are computed one by one.
    return Chunk(ids, span.start, chunk.pages, False, _GREEDY, num_drafts=num_drafts)
