"""The torch model runner makes one packed forward pass per engine step over the paged KV pool."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from services.engine.paged.drafters import DraftFailures
from services.engine.paged.model_runner import Chunk, Sampled, keep_accepted
from services.engine.torch.adapters import TorchAdapters
from services.engine.torch.checkpoint import (
    Checkpoint,
    computed_by,
    load_model,
    open_checkpoint,
    stored_weights,
)
from services.engine.torch.device import abandon_step, finish_step, open_device, warn_if_slow
from services.engine.torch.draft import DraftModelSettings, TorchDraft
from services.engine.torch.draft_tokens import single_tokens
from services.engine.torch.model.packed_model import PackedModel
from services.engine.torch.model.self_check import check
from services.engine.torch.pinned_staging import CudaQueue, PinnedStaging
from services.engine.torch.pools import KvDtype, Pools
from services.engine.torch.quantized.as_stored import WeightsForm, multiply_as_stored, way_of
from services.engine.torch.sampling.device_sampler import open_sampler
from services.engine.torch.sampling.scored_rows import report_scores
from services.engine.torch.sampling.step_masks import NO_MASKS, StepMasks
from services.engine.torch.sampling.torch_sampler import sample
from services.engine.torch.shared_weights import SharedWeights
from services.engine.torch.step_graphs import graph_budget, open_graphs
from services.grammar.matcher import MaskCounts
from services.kv.tails import PoolSizes
from services.tier.copies import Staging
from services.values.errors import ConfigError, ProtocolError
from services.values.kv import PageId, PoolMemory

# This share of the budget is kept for the draft model's graphs, which also get what the others leave.
_DRAFT_SHARE = 4


class TorchRunner:
    """This class implements ModelRunner. It is made, called and closed on one thread."""

    max_step_drafts = 1 << 20  # A step's drafts need memory only for a moment, so this is never reached.

    def __init__(
        self,
        model_path: Path | str,
        *,
        device: str = "cpu",
        num_pages: int,
        page_size: int,
        dtype: str | None = None,
        num_threads: int | None = None,
        sizes: PoolSizes | None = None,
        index_block: int = 64,
        self_check: bool = True,
        shares_weights: bool = False,
        draft: DraftModelSettings | None = None,
        max_rows: int = 0,
        max_prompt_tokens: int = 0,
        max_drafts: int = 0,
        graph_mib: int | None = None,
        fuses: bool = True,
        kv_dtype: KvDtype | None = None,
        weights: WeightsForm | None = None,
        lora: Mapping[str, Path] | None = None,
    ) -> None:
        """Load the checkpoint and allocate the pools, with `num_pages` pages of full attention.

        `device` is cpu, cuda or cuda:N. `dtype` None means the checkpoint's. `num_threads` sets torch's
        threads for the whole process. Sequences continue at multiples of `index_block`. Without `self_check`
        the runner also serves a model whose results change when a prompt is computed in pieces. With
        `shares_weights` the processes of one machine that do so hold one copy of the weights. `draft` is a
        small model that drafts.

        On a GPU, CUDA graphs replay steps of up to `max_rows` single tokens and of up to `max_prompt_tokens`
        prompt tokens. A sequence has up to `max_drafts` drafts in a step, which are single tokens, too;
        recurrent layers need graphs of their own for them. The graphs take at most about `graph_mib` MiB;
        None means a 64th of the card's memory and at least 256 MiB. With `fuses` our own kernels compute some
        operations of the model and of the draft model.

        K and V are stored in `kv_dtype`; None means the model's type. Recurrent states keep their type.

        `weights` applies on a GPU, in half precision. With None, 8-bit floats and 4-bit numbers are
        multiplied as the checkpoint stores them. With "fp8" and "int4" all weights but the head's are rounded
        to that form at the start. With "dequantized" all are multiplied in the model's dtype.

        `lora` has directories of adapters by name.

        Raises ConfigError where the device, the checkpoint or a pool cannot work, and the message says why.
        Raises Unavailable where memory, the device or a file is missing now, so that another start may
        succeed.
        """
        self._device = open_device(device)
        if num_threads is not None:
            _set_num_threads(num_threads)
        checkpoint = open_checkpoint(Path(model_path), dtype)
        warn_if_slow(self._device, checkpoint.dtype)
        model = load_model(checkpoint, self._device)
        self._model = PackedModel(model, torch.get_num_threads(), index_block, fuses=fuses)
        if self_check:
            check(self._model, page_size, str(checkpoint.directory), kv_dtype)
        fingerprint = self._as_stored(checkpoint, weights)
        self._model.pack(torch.get_num_threads(), SharedWeights() if shares_weights else None)
        self._sampler = open_sampler(self._device, checkpoint.vocab_size, self._model.probed.logits_dtype)
        self._pools = Pools(
            self._model.probed,
            num_pages=num_pages,
            page_size=page_size,
            sizes=sizes or PoolSizes(),
            model_fingerprint=fingerprint,
            device=self._device,
            kv_dtype=kv_dtype,
        )
        budget = graph_budget(self._device, graph_mib)
        own = budget - budget // _DRAFT_SHARE if draft is not None else budget
        self._graphs = open_graphs(self._model, self._pools, max_rows, own, max_prompt_tokens, max_drafts)
        left = max(0, budget - self._graphs.bytes)
        self.draft = self._open_draft(draft, checkpoint, left, fuses) if draft is not None else None
        self._draft_failures = DraftFailures("prompts")
        kv = self.draft.kv if self.draft is not None else None
        self.layout = replace(self._pools.layout, draft=kv)
        self.adapters = TorchAdapters(self._model.model, self._model.linear_sizes, self._device)
        for name, directory in (lora or {}).items():
            self.adapters.put(self.adapters.read(name, directory))
        self.vocab_size = checkpoint.vocab_size
        self.max_context_tokens = checkpoint.max_context_tokens
        self._masks = StepMasks(checkpoint.vocab_size)
        self._launched: Callable[[], None] = lambda: None

    @property
    def memory(self) -> PoolMemory:
        return self._pools.memory[0]

    @property
    def carried_memory(self) -> tuple[PoolMemory, ...]:
        return self._pools.memory[1:]

    @property
    def steps_by_way(self) -> Mapping[str, int]:
        return self._graphs.counts

    @property
    def mask_counts(self) -> MaskCounts:
        return self._masks.counts

    def when_launched(self, call: Callable[[], None]) -> bool:
        if self._device.type != "cuda":
            return False
        self._launched = call
        return True

    def run(self, chunks: Sequence[Chunk]) -> list[tuple[Sampled, ...]]:
        """Compute a step as ModelRunner.run defines it.

        Raises ProtocolError for a chunk that is empty, that lacks pages or whose drafts do not fit its
        tokens.
        """
        if not chunks:
            return []
        page_size, loaded = self.layout.page_size, self.adapters.loaded
        for chunk in chunks:
            num_tokens = len(chunk.token_ids)
            if not num_tokens or len(chunk.pages) * page_size < chunk.start + num_tokens:
                tokens = f"{num_tokens} tokens at {chunk.start}"
                raise ProtocolError(f"a chunk of {tokens} with {len(chunk.pages)} pages of {page_size}")
            if chunk.num_drafts and (num_tokens != 1 + chunk.num_drafts or not chunk.sample):
                raise ProtocolError(f"a chunk of {num_tokens} tokens with {chunk.num_drafts} drafts")
            if chunk.adapter is not None and chunk.adapter not in loaded:
                raise ProtocolError(f"adapter {chunk.adapter} is not loaded")
        try:
            with self.adapters.computing(chunks) if self.adapters.loaded else nullcontext():
                results = self._run(chunks)
            finish_step(self._device)
        except BaseException as error:
            abandon_step(self._device, error)
            raise
        return results

    def copy_slots(self, moves: Sequence[tuple[int, int]]) -> None:
        if self._pools.slots is None:
            raise ProtocolError(f"{self.layout} has no recurrent state")
        self._pools.slots.copy(moves)
        finish_step(self._device)  # A transfer may get a slot next, and no stream orders that.

    def read_pages(self, pages: Sequence[PageId], group: int = 0) -> Iterator[memoryview]:
        if self.draft is not None and group == len(self._pools.layout.groups):
            return self.draft.read_pages(pages)
        return self._pools.read(pages, group)

    def staging(self, slot_bytes: int) -> Staging | None:
        if self._device.type == "cpu":
            return None
        return PinnedStaging(slot_bytes, self.units, CudaQueue(self._device))

    @property
    def units(self) -> tuple[Tensor, ...]:
        """Return the bytes of each pool, uint8 [num_units, unit_bytes], in the order of the layout's."""
        drafts = () if self.draft is None else (self.draft.units,)
        return (*self._pools.units, *drafts)

    def _as_stored(self, checkpoint: Checkpoint, form: WeightsForm | None) -> int:
        """Let linear layers multiply weights as stored, and return the resulting model's fingerprint."""
        is_stored = form is None and checkpoint.is_quantized
        is_here = self._device.type == "cuda" and checkpoint.dtype is not torch.float32
        if not is_here or form == "dequantized" or not (form or is_stored):
            return checkpoint.fingerprint
        weights = form or stored_weights(checkpoint)
        kinds: dict[str, str] = {}
        kept = self._model.probed.read_linears
        multiply_as_stored(self._model.model, kept, weights, report=kinds.__setitem__)
        way = way_of(form, kinds)
        return computed_by(checkpoint.fingerprint, way) if way else checkpoint.fingerprint

    def _open_draft(
        self, settings: DraftModelSettings, target: Checkpoint, budget: int, fuses: bool
    ) -> TorchDraft:
        num_pages, page_size = self.memory.num_pages, self._pools.layout.page_size
        return TorchDraft(
            settings,
            target,
            num_pages=num_pages,
            page_size=page_size,
            device=self._device,
            graph_budget=budget,
            sampler=self._sampler,
            fuses=fuses,
        )

    def _run(self, chunks: Sequence[Chunk]) -> list[tuple[Sampled, ...]]:
        has_drafts = any([chunk.num_drafts for chunk in chunks])
        tokens = [each for chunk in chunks for each in single_tokens(chunk)] if has_drafts else chunks
        masks = self._masks.begin(chunks)
        with torch.inference_mode():
            scores = any([chunk.scoring is not None for chunk in chunks])
            rows = _sampled_offsets(tokens)
            computed = self._graphs.compute(chunks, rows)
            self._launched()
            if computed is None:  # Python launches its kernels one by one, and the device waits for it.
                computed = self._model.compute(self._pools, chunks, rows, keeps_layers=scores)
            if scores:
                report_scores(chunks, computed.logits_of, self.vocab_size)
            allowed = masks.end() if masks is not None else NO_MASKS
            choose = self._sampler or sample
            choosing = [each for each in tokens if each.sample]
            sampled = iter(choose(computed.logits, choosing, allowed, computed.most_probable))
            if has_drafts:
                kept = [_keep_accepted(chunk, sampled) for chunk in chunks]
                drafted = zip(chunks, kept, strict=True)
                computed.keep([len(choices) for chunk, choices in drafted if chunk.num_drafts])
            else:
                kept = [(next(sampled),) if chunk.sample else () for chunk in chunks]
            if self.draft is not None and not self._draft_failures.gave_up:
                with self._draft_failures.noting():
                    self.draft.compute_with(chunks)
        return kept

    def close(self) -> None:
        if self.draft is not None:
            self.draft.close()
        self._masks.close()
        self._graphs.close()
        self._pools.close()
        self._model.close()


def _set_num_threads(num_threads: int) -> None:
    if num_threads < 1:
        raise ConfigError(f"num_threads must be 1 or more, got {num_threads}")
    torch.set_num_threads(num_threads)


def _keep_accepted(chunk: Chunk, sampled: Iterator[Sampled]) -> tuple[Sampled, ...]:
    return keep_accepted(chunk.drafts, list(islice(sampled, 1 + chunk.num_drafts))) if chunk.sample else ()


def _sampled_offsets(chunks: Sequence[Chunk]) -> list[int]:
    offsets, end = [], 0
    for chunk in chunks:
        end += len(chunk.token_ids)
        if chunk.sample:
            offsets.append(end - 1)
    return offsets
