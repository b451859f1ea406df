"""A model definition over a packed step: what the runner computes with, and checks at start."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from services.engine.paged.runner import Chunk
from services.engine.torch.attention.step_view import view_step
from services.engine.torch.draft_tokens import single_tokens
from services.engine.torch.linear.packed_linear import pack_linears
from services.engine.torch.model.activations import even_activations
from services.engine.torch.model.mixers import place_rows, wrap
from services.engine.torch.model.probe import probe
from services.engine.torch.model.recurrence import Workers, forward_in_place
from services.engine.torch.model.slots import SlotPool
from services.engine.torch.model.step_cache import StepCache
from services.engine.torch.pools import Pools
from services.kv.carried.borders import scan_tokens


@dataclass(frozen=True, slots=True)
class Computed:
    """A step's `logits` [num_rows, vocab_size], and what of it waits for the choices."""

    logits: Tensor
    _cache: StepCache

    def keep(self, counts: Sequence[int]) -> None:
        """Let states take in so many tokens of each chunk with drafts; they have taken in none of them."""
        if self._cache.tokens is None or not counts:
            return
        kept = self._cache.tokens.runs.kept(counts)
        for take in self._cache.waiting:
            take(kept)


class PackedModel:
    """`remembered` says what pools it needs."""

    def __init__(self, model: PreTrainedModel, num_threads: int = 1, index_block: int = 64) -> None:
        """Probe it, and wrap its recurrent layers. Raises ConfigError and Unavailable as probe."""
        self.model = model
        # On a GPU nothing promises the same bits, and short scans leave it idle.
        self.scan_tokens = scan_tokens(index_block) if self.device.type == "cpu" else None
        self.remembered = probe(model)
        if self.device.type == "cpu":
            even_activations(model)
        self._workers = Workers(num_threads)
        self.in_place = False  # that recurrences of single tokens are computed so
        for mixer in self.remembered.mixers:
            kinds = {kind for _, kind, _ in mixer.states}
            is_on_cpu = self.device.type == "cpu"
            forward = forward_in_place(mixer.module, self._workers, kinds) if is_on_cpu else None
            wrap(mixer, forward)
            self.in_place |= forward is not None

    def pack(self, num_threads: int) -> None:
        """Put the weights in the order in which they are read; `num_threads` is how many torch has.

        Raises ConfigError where the model cannot compute so.
        """
        pack_linears(self.model, num_threads, self.remembered.read_linears)
        probe(self.model)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    def compute(self, pools: Pools, chunks: Sequence[Chunk], rows: Sequence[int]) -> Computed:
        """Compute a step, store what it keeps, and give the logits after some rows: [len(rows), vocab_size].

        Raises ProtocolError where a chunk lacks pages or a slot.
        """
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        positions = self._tensor([p for chunk in chunks for p in range(chunk.start, chunk.end)])
        cache = StepCache(pools.calls, positions)
        if pools.slots is not None:
            self._place_mixers(cache, pools.slots, chunks)
        queries = [each for chunk in chunks for each in single_tokens(chunk)]
        cache.view = view_step(pools.layers, queries, cache)
        kept = self._tensor(rows)
        outputs = self.model(
            input_ids=self._tensor(token_ids)[None],
            position_ids=positions[None],
            past_key_values=cache,
            use_cache=False,
            logits_to_keep=kept,
            paged=cache.view,
        )
        logits: Tensor = outputs.logits[0]
        # Some definitions give all of them.
        return Computed(logits if len(logits) == len(rows) else logits[kept], cache)

    def close(self) -> None:
        """End the threads."""
        self._workers.close()

    def _place_mixers(self, cache: StepCache, slots: SlotPool, chunks: Sequence[Chunk]) -> None:
        """The slots of sequences that begin are zeroed."""
        cache.slots, cache.in_place = slots, self.in_place
        place_rows(cache, chunks, slots.num_slots, self.scan_tokens)
        slots.zero([chunk.slot for chunk in chunks if chunk.start == 0 and chunk.slot is not None])

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
