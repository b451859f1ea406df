"""A thread makes the masks of a step while the model computes.

`begin` starts llguidance, which runs without the GIL, and `end` waits for it and returns RowMasks for
sample().
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from services.engine.paged.model_runner import Chunk, masks_asked
from services.grammar.matcher import MaskCounts, MaskMaker, Masks


@dataclass(frozen=True, slots=True)
class RowMasks:
    """This has the allowed tokens of a step's rows of logits.

    Rows that are not in `rows` allow all tokens.
    """

    masks: Masks | None = None
    rows: Mapping[int, int] = field(default_factory=dict)  # It maps rows of the logits to rows of the masks.

    def allows(self, row: int, token_id: int) -> bool:
        return self.masks is None or row not in self.rows or self.masks.allows(self.rows[row], token_id)

    def applied(self, values: Tensor, rows: Sequence[int]) -> Tensor:
        """Return `values` of these rows, with -inf where a token is not allowed.

        The values themselves stay unchanged.
        """
        own = [index for index, row in enumerate(rows) if row in self.rows]
        if not own:
            return values
        allowed = self._allowed([self.rows[rows[index]] for index in own], values)
        if len(own) == len(rows):
            return torch.where(allowed, values, -torch.inf)
        masked = values.clone()
        masked[own] = torch.where(allowed, values[own], -torch.inf)
        return masked

    def _allowed(self, rows: Sequence[int], like: Tensor) -> Tensor:
        assert self.masks is not None
        chosen = Masks(np.ascontiguousarray(self.masks.words[rows]), self.masks.vocab_size)
        if like.device.type == "cpu":
            return torch.from_numpy(chosen.expanded())
        # This copies 32 times fewer bytes, and nothing waits for them.
        words = torch.from_numpy(chosen.words).pin_memory().to(like.device, non_blocking=True)
        bits = words[:, :, None] >> torch.arange(32, device=like.device) & 1
        return bits.flatten(1)[:, : chosen.vocab_size].bool()


NO_MASKS = RowMasks()


@dataclass(frozen=True, slots=True)
class MasksToCome:
    making: Future[Masks]
    rows: Mapping[int, int]

    def end(self) -> RowMasks:
        return RowMasks(self.making.result(), self.rows)


class StepMasks:
    def __init__(self, vocab_size: int) -> None:
        self._maker = MaskMaker(vocab_size)
        self._thread = ThreadPoolExecutor(1, "masks")

    @property
    def counts(self) -> MaskCounts:
        return self._maker.counts

    def begin(self, chunks: Sequence[Chunk]) -> MasksToCome | None:
        requests = masks_asked(chunks)
        if not requests:
            return None
        rows, row = list[int](), 0
        for chunk in chunks:
            if chunk.sample:
                num_rows = 1 + chunk.num_drafts
                rows += range(row, row + num_rows) if chunk.matcher is not None else ()
                row += num_rows
        return MasksToCome(
            self._thread.submit(self._maker.make, requests), {row: i for i, row in enumerate(rows)}
        )

    def close(self) -> None:
        self._thread.shutdown()
