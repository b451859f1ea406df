"""The torch model runner: one packed forward pass per engine step over the paged KV pool."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from services.engine.paged.runner import Chunk, Sampled
from services.engine.torch.attention.in_place import choose_in_place, end_threads
from services.engine.torch.attention.layers import LayerPlace, PagedLayers, Reach
from services.engine.torch.attention.step_view import view_step
from services.engine.torch.checkpoint import load_model, open_checkpoint
from services.engine.torch.device import abandon_step, finish_step, open_device
from services.engine.torch.linear.packed_linear import pack_linears
from services.engine.torch.pool import KvPool, full_attention_group
from services.engine.torch.sampling import sample
from services.engine.torch.step_cache import StepCache
from services.values.errors import ConfigError, ProtocolError
from services.values.kv import KvLayout, PageId, PoolMemory

# While transformers makes a model, its dtype is torch's default and no weights are tied, in the whole
# process. Two that are made at once restore each other's state: half precision, or weights untied, for good.
LOADING = threading.Lock()


class TorchRunner:
    """A ModelRunner. Made, called and closed on one thread."""

    def __init__(
        self,
        model_path: Path | str,
        *,
        device: str = "cpu",
        num_pages: int,
        page_size: int,
        dtype: str | None = None,
        num_threads: int | None = None,
    ) -> None:
        """Load the checkpoint and allocate the pool.

        `device` is cpu, cuda or cuda:N; `dtype` None is the checkpoint's. `num_threads` sets torch's
        threads for the whole process.

        Raises:
            ConfigError: the device, the checkpoint or the pool cannot work; the message says why.
            Unavailable: memory, the device or a file is not to be had now; another start may do.
        """
        self._device = open_device(device)
        if num_threads is not None:
            _set_num_threads(num_threads)
        checkpoint = open_checkpoint(Path(model_path), dtype)
        config = checkpoint.config
        with LOADING:
            self._model = load_model(checkpoint, self._device)
        pack_linears(self._model, torch.get_num_threads())
        group = full_attention_group(
            config.num_hidden_layers, config.num_key_value_heads, checkpoint.head_dim, checkpoint.dtype
        )
        self._pool = KvPool(group, num_pages=num_pages, page_size=page_size, device=self._device)
        self._layout = KvLayout(page_size, self._pool.unit_bytes, checkpoint.fingerprint, groups=(group,))
        self._in_place = choose_in_place([self._pool.kv], config.num_attention_heads)
        places = {layer: LayerPlace(Reach(0), layer) for layer in group.layer_ids}
        self._layers = PagedLayers([self._pool.kv], self._in_place, places)
        self._vocab_size: int = config.vocab_size
        self._max_context_tokens = checkpoint.max_context_tokens

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def memory(self) -> PoolMemory:
        return self._pool.memory

    @property
    def carried_memory(self) -> tuple[PoolMemory, ...]:
        return ()

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_context_tokens(self) -> int:
        return self._max_context_tokens

    def run(self, chunks: Sequence[Chunk]) -> list[Sampled | None]:
        """See ModelRunner.run. Raises ProtocolError for a chunk that is empty or lacks pages."""
        if not chunks:
            return []
        for chunk in chunks:
            _require_pages(chunk, self.layout.page_size)
        try:
            results = self._run(chunks)
            finish_step(self._device)
        except BaseException as error:
            abandon_step(self._device, error)
            raise
        return results

    def copy_slots(self, moves: Sequence[tuple[int, int]]) -> None:
        raise ProtocolError(f"{self.layout} has no recurrent state")

    def read_pages(self, pages: Sequence[PageId], group: int = 0) -> Iterator[memoryview]:
        if group:
            raise ProtocolError(f"{self.layout} has no group {group}")
        return self._pool.read_pages(pages)

    def _run(self, chunks: Sequence[Chunk]) -> list[Sampled | None]:
        with torch.inference_mode():
            sampled = iter(sample(self._forward(chunks), [chunk for chunk in chunks if chunk.sample]))
        return [next(sampled) if chunk.sample else None for chunk in chunks]

    def _forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Logits after the last token of each chunk that samples, [num_sampled, vocab_size]."""
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        positions = [position for chunk in chunks for position in range(chunk.start, chunk.end)]
        cache = StepCache()
        outputs = self._model(
            input_ids=self._tensor(token_ids)[None],
            position_ids=self._tensor(positions)[None],
            use_cache=False,
            logits_to_keep=self._tensor(_sampled_offsets(chunks)),
            past_key_values=cache,
            paged=view_step(self._layers, chunks, cache),
        )
        logits: torch.Tensor = outputs.logits[0]
        return logits

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def close(self) -> None:
        """Free the pool and end the threads; the runner cannot run any more."""
        end_threads(self._in_place)
        self._pool.close()


def _set_num_threads(num_threads: int) -> None:
    if num_threads < 1:
        raise ConfigError(f"num_threads must be 1 or more, got {num_threads}")
    torch.set_num_threads(num_threads)


def _require_pages(chunk: Chunk, page_size: int) -> None:
    if not chunk.token_ids or len(chunk.pages) * page_size < chunk.end:
        tokens = f"{len(chunk.token_ids)} tokens at {chunk.start}"
        raise ProtocolError(f"a chunk of {tokens} with {len(chunk.pages)} pages of {page_size}")


def _sampled_offsets(chunks: Sequence[Chunk]) -> list[int]:
    """Where in the step the last token of each chunk that samples is."""
    offsets, end = [], 0
    for chunk in chunks:
        end += len(chunk.token_ids)
        if chunk.sample:
            offsets.append(end - 1)
    return offsets
