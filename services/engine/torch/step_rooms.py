"""The buffers of a step have room for as much as these say.

A plan that does not fit its room is computed without buffers.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from services.engine.torch.attention.cpu_attention_kernel import PagePieces
from services.engine.torch.attention.page_pieces import OnDevice, PieceParts, rows_of
from services.engine.torch.attention.step_view import PagedLayers, Reach
from services.values.kv import GroupKind

# The parts' outputs of one layer take so many bytes at most where rows share many pages. A step that needs
# more runs without buffers.
_OUTPUT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class PiecesPlan:
    pages: NDArray[np.integer]
    readers: NDArray[np.int64]
    parts: PieceParts
    pieces: PagePieces | None = None  # It is None where the last step's plan went on.


@dataclass(frozen=True, slots=True)
class Room:
    """This is the room that one reach has; PartsView describes each field."""

    grid: tuple[int, int]
    num_pages: int
    num_outputs: int  # This limits the readings and the readers, too.


@dataclass(frozen=True, slots=True)
class PromptRoom:
    """There is room for `num_prompts` chunks of `num_tokens` in all, which see `num_seen` tokens together.

    Where latents are expanded, single tokens attend as prompts do, and are among those that see. Then a room
    may have no prompts.
    """

    num_tokens: int
    num_prompts: int
    num_seen: int

    def num_chunks(self, reach: Reach, num_singles: int = 0) -> int:
        """Return how many chunks attend at most: each window has its own, where windows are chunks.

        With `num_singles` single tokens attend, too, and those that pad them are one more chunk.
        """
        if reach.kind is not GroupKind.CHUNKED_WINDOW:
            return self.num_prompts + (num_singles + 1 if num_singles else 0)
        return 2 * self.num_prompts + self.num_tokens // reach.window


@dataclass(frozen=True, slots=True)
class RunRoom:
    """Recurrent layers compute `num_runs` runs of up to `num_tokens` single tokens, one token a round."""

    num_runs: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepRoom:
    """There is room for `num_singles` single tokens, and for prompts or runs of those tokens.

    With `is_scan` recurrent layers scan one chunk of a prompt, which has as many tokens as there is room for:
    a scan of more would leave another state.
    """

    num_singles: int
    prompts: PromptRoom | None = None
    runs: RunRoom | None = None
    is_scan: bool = False

    @property
    def num_tokens(self) -> int:
        """Return the number of prompts' tokens."""
        return self.prompts.num_tokens if self.prompts is not None else 0

    @property
    def num_seen(self) -> int:
        return self.prompts.num_seen if self.prompts is not None else 0

    @property
    def num_kept(self) -> int:
        """Return how many rows have logits."""
        return self.num_singles + (self.prompts.num_prompts if self.prompts is not None else 0)


class StepOutputs:
    """All layers, reaches and buffers in turn write the outputs of parts to this memory."""

    def __init__(self, layers: PagedLayers, num_rows: int, device: torch.device) -> None:
        sizes = [
            (room_of(layers, reach, num_rows).num_outputs * on_device(layers, reach).num_heads, reach)
            for reach in layers.reaches
            if not is_latent(layers, reach)
        ]
        num_log_sums = max((size for size, _ in sizes), default=0)
        of_reaches = (size * layers.pools[reach.pool].shape.v_head_dim for size, reach in sizes)
        num_numbers = max(of_reaches, default=0)
        self.numbers = torch.zeros(num_numbers, dtype=torch.float32, device=device)
        self.log_sums = torch.zeros(num_log_sums, dtype=torch.float32, device=device)


def is_latent(layers: PagedLayers, reach: Reach) -> bool:
    return layers.pools[reach.pool].is_latent


def on_device(layers: PagedLayers, reach: Reach) -> OnDevice:
    chosen = layers.in_place[reach.pool]
    assert isinstance(chosen, OnDevice), "attention gathers"
    return chosen


def room_of(layers: PagedLayers, reach: Reach, num_rows: int) -> Room:
    """Return the room that `num_rows` single tokens need at most, however they share pages.

    The number of outputs has a limit of its own.
    """
    if num_rows == 0 or is_latent(layers, reach):
        return Room((0, 0), 0, 0)
    kv, chosen = layers.pools[reach.pool], on_device(layers, reach)
    of_a_head = chosen.num_programs // kv.shape.num_kv_heads + 1
    # A tree of rows has fewer inner pieces than rows; a piece is cut once more than there are programs for.
    narrow_rows, group = rows_of(kv, chosen.num_heads)[0], chosen.num_heads // kv.shape.num_kv_heads
    has_wide = num_rows * group > narrow_rows
    grid = of_a_head + 3 * num_rows, of_a_head + num_rows if has_wide else 0
    # Each row may read another part of a page that is being filled, and of one that a window cuts.
    num_pages = kv.num_pages + 2 * num_rows
    if reach.window:
        num_pages = min(num_pages, num_rows * (reach.window // kv.shape.page_size + 2))
    most = num_rows * (of_a_head + 4)
    fitting = _OUTPUT_BYTES // (4 * chosen.num_heads * kv.shape.v_head_dim)
    return Room(grid, num_pages, min(most, max(8 * num_rows + 2 * chosen.num_programs, fitting)))


def fits(plan: PiecesPlan, room: Room) -> bool:
    num_parts, num_narrow = len(plan.parts.table), plan.parts.num_narrow
    return (
        num_narrow <= room.grid[0]
        and num_parts - num_narrow <= room.grid[1]
        and len(plan.parts.joins.readings) <= room.num_outputs
        and len(plan.readers) <= room.num_outputs
        and len(plan.pages) <= room.num_pages
    )
