"""A model definition computes packed steps here, for the runner and for the checks at the start."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from services.engine.paged.model_runner import Chunk
from services.engine.torch.attention.step_view import StepView, view_step
from services.engine.torch.device import send
from services.engine.torch.draft_tokens import single_tokens
from services.engine.torch.linear_kernel import pack_linears
from services.engine.torch.model.activations import even_activations
from services.engine.torch.model.fused.fuse import fuse
from services.engine.torch.model.fused.products import Fused
from services.engine.torch.model.mixers import place_rows, wrap
from services.engine.torch.model.model_probe import probe
from services.engine.torch.model.norm_kernel import fuse_norms
from services.engine.torch.model.recurrence import Workers, forward_in_place
from services.engine.torch.model.step_cache import StepCache, cache_argument
from services.engine.torch.pools import Pools, SlotPool
from services.engine.torch.shared_weights import SharedWeights, share_parameters
from services.engine.torch.step_buffers import StepBuffers
from services.kv.checkpoints import scan_tokens


@dataclass(frozen=True, slots=True)
class Computed:
    """A step's `logits` are [num_rows, vocab_size].

    The private fields compute logits of other rows, and update states with accepted drafts.
    """

    logits: Tensor
    _cache: StepCache | None = None
    _head: "_Head | None" = None
    take: Callable[[Sequence[int]], None] | None = None  # A graph does what `keep` does, where it is given.
    most_probable: Tensor | None = (
        None  # Where it is known, this is the id of each row's highest logit, int64 [num_rows].
    )

    def logits_of(self, rows: Sequence[int]) -> Tensor:
        """Return the logits after other rows; `compute` must have been called with `keeps_layers`."""
        assert self._head is not None, "nothing was kept to compute them from"
        return self._head.logits_of(rows)

    def keep(self, counts: Sequence[int]) -> None:
        """Update states with the first tokens of each chunk with drafts, as many as `counts` has.

        Until then the states include none of these tokens.
        """
        if self.take is not None and counts:
            self.take(counts)
        if self._cache is None or self._cache.tokens is None or not counts:
            return
        kept = self._cache.tokens.runs.kept(counts)
        for take in self._cache.waiting:
            take(kept)


class PackedModel:
    def __init__(
        self,
        model: PreTrainedModel,
        num_threads: int = 1,
        index_block: int = 64,
        fuses: bool = True,
    ) -> None:
        """Probe the model, wrap its recurrent layers, and with `fuses` fuse its small operations on a GPU.

        Raises ConfigError and Unavailable as probe does.
        """
        self.model = model
        # On a GPU nothing guarantees equal bits, and short scans would leave it idle.
        self.scan_tokens = scan_tokens(index_block) if self.device.type == "cpu" else None
        self._cache_argument = cache_argument(model)
        self.probed = probe(model)
        whole = self.probed.whole_linears
        self.linear_sizes = {  # These are the inputs and outputs of layers that may have adapters.
            name: (each.in_features, each.out_features)
            for name, each in model.named_modules()
            if isinstance(each, torch.nn.Linear) and each in whole
        }
        self.fused = Fused()
        if fuses and self.device.type == "cuda":
            self.fused = fuse(model, self.probed.read_linears)
        if self.device.type == "cpu":
            even_activations(model)
            fuse_norms(model)
        self._workers = Workers(num_threads)
        self.in_place = False  # This is whether recurrences of single tokens update states in place.
        for mixer in self.probed.mixers:
            kinds = {kind for _, kind, _ in mixer.states}
            is_on_cpu = self.device.type == "cpu"
            forward = forward_in_place(mixer.module, self._workers, kinds) if is_on_cpu else None
            wrap(mixer, forward)
            self.in_place |= forward is not None

    def pack(self, num_threads: int, weights: SharedWeights | None = None) -> None:
        """Put the weights into the order in which they are read.

        `num_threads` is torch's number of threads. With `weights` other processes share them. Raises
        ConfigError where the model cannot compute then.
        """
        pack_linears(self.model, num_threads, self.probed.read_linears, weights)
        if weights is not None:
            share_parameters(self.model, weights)
        probe(self.model)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    def compute(
        self, pools: Pools, chunks: Sequence[Chunk], rows: Sequence[int], *, keeps_layers: bool = False
    ) -> Computed:
        """Compute a step, store its KV and states, and return the logits [len(rows), vocab_size].

        With `keeps_layers`, the logits of other rows can be computed later without running the layers again.
        Raises ProtocolError where a chunk lacks pages or a slot.
        """
        token_ids, positions, kept = send(
            (*_ids_and_positions(chunks), np.array(rows, np.int64)), self.device
        )
        cache = StepCache(pools.calls, positions)
        if pools.slots is not None:
            self._place_mixers(cache, pools.slots, chunks)
        queries = [each for chunk in chunks for each in single_tokens(chunk)]
        cache.view = view_step(pools.layers, queries, cache)
        call = partial(
            self.model,
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            paged=cache.view,
            **{self._cache_argument: cache},
        )
        if keeps_layers:
            head = _Head(_layers_of(self.model), call, self.device)
            return Computed(head.logits_of(rows), cache, head)
        return Computed(_kept(call(logits_to_keep=kept).logits[0], kept), cache)

    def logits_of(self, pools: Pools, buffers: StepBuffers) -> Tensor:
        """Compute and store the step in the buffers, and return the logits of its `kept` rows."""
        cache = StepCache(pools.calls, buffers.positions)
        cache.slots, cache.sequences = pools.slots, buffers.sequences
        cache.tokens, cache.rounds = buffers.tokens, buffers.rounds
        buffers.takes = cache.takes
        cache.view = StepView(pools.layers, cache, buffers.views)
        logits: Tensor = self.model(
            input_ids=buffers.token_ids[None],
            position_ids=buffers.positions[None],
            use_cache=False,
            paged=cache.view,
            logits_to_keep=buffers.kept,
            **{self._cache_argument: cache},
        ).logits[0]
        return logits

    def close(self) -> None:
        self._workers.close()

    def _place_mixers(self, cache: StepCache, slots: SlotPool, chunks: Sequence[Chunk]) -> None:
        cache.slots, cache.in_place = slots, self.in_place
        place_rows(cache, chunks, slots.num_slots, self.scan_tokens)
        slots.zero([chunk.slot for chunk in chunks if chunk.start == 0 and chunk.slot is not None])


def _ids_and_positions(chunks: Sequence[Chunk]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    lengths = [len(chunk.token_ids) for chunk in chunks]
    total = sum(lengths)
    token_ids = np.fromiter(chain.from_iterable(chunk.token_ids for chunk in chunks), np.int64, total)
    offsets = accumulate(lengths, initial=0)
    before = [chunk.start - offset for chunk, offset in zip(chunks, offsets, strict=False)]
    return token_ids, np.arange(total) + np.repeat(np.array(before, np.int64), lengths)


def _layers_of(model: PreTrainedModel) -> torch.nn.Module:
    layers: torch.nn.Module = model.base_model
    if layers is model:  # Some definitions have no name for it.
        layers = model.get_submodule("model")
    return layers


class _Head:
    """The head computes logits from the output of a step's layers.

    It calls the whole model definition, so that logits have its own scales and caps. The layers compute at
    the first call of a step; at later ones they return what they returned then.
    """

    def __init__(self, layers: torch.nn.Module, call: Callable[..., Any], device: torch.device) -> None:
        self._layers = layers
        self._call = call
        self._device = device
        self._given: Any = None

    def logits_of(self, rows: Sequence[int]) -> Tensor:
        kept = torch.tensor(rows, dtype=torch.int64, device=self._device)
        with self._keeping() if self._given is None else self._repeating():
            return _kept(self._call(logits_to_keep=kept).logits[0], kept)

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        def keep(_module: object, _arguments: object, given: Any) -> None:
            self._given = given

        hook = self._layers.register_forward_hook(keep)
        try:
            yield
        finally:
            hook.remove()

    @contextmanager
    def _repeating(self) -> Iterator[None]:
        """Let the layers repeat their output: an instance's own method takes precedence over its class's."""
        assert "forward" not in vars(self._layers), "somebody else has replaced it"
        self._layers.forward = lambda *_arguments, **_named: self._given
        try:
            yield
        finally:
            del self._layers.forward


def _kept(logits: Tensor, rows: Tensor) -> Tensor:
    return logits if len(logits) == len(rows) else logits[rows]
