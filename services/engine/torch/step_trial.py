"""A graph is tried with a random step over the pools' first pages, which is computed in two ways."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from services.engine.paged.model_runner import Chunk, TailPages
from services.engine.torch.device import finish_step
from services.engine.torch.model.kv_groups import StateName
from services.engine.torch.model.packed_model import PackedModel
from services.engine.torch.pools import Pools
from services.engine.torch.step_rooms import StepRoom
from services.values.kv import PageId
from services.values.request import SamplingParams

_CONTEXT_PAGES = 2  # These precede a single token's own page.
_ROWS_OF_A_PROMPT = 6  # So many rows are compared.


class StepTrial:
    """Single tokens and one or two prompts share a first page, and each then has pages of its own.

    `chunks` has the single tokens first, then the prompts.
    """

    def __init__(self, model: PackedModel, pools: Pools, room: StepRoom) -> None:
        num_singles, longest = room.num_singles, 1
        if room.runs is not None:
            num_singles, longest = room.runs.num_runs, room.runs.num_tokens
        self._pools, self._device = pools, model.device
        self._chance = random.Random(num_singles)
        self._page_size, self._num_tails = pools.layout.page_size, len(pools.layers.pools) - 1
        self._vocab_size = model.model.config.get_text_config().vocab_size
        smallest = min(kv.num_pages for kv in pools.layers.pools)
        self._num_pages = 1
        self.chunks: list[Chunk] = []
        self._states: dict[StateName, Tensor] = {}
        for length in _prompt_lengths(room, (smallest // 2) * self._page_size):
            self.chunks.append(self._chunk(range(length), -(-length // self._page_size)))
        num_slots = pools.slots.num_slots if pools.slots is not None else num_singles
        num_rows = min(num_singles, num_slots, max(1, smallest - self._num_pages))
        of_each = max(1, min(_CONTEXT_PAGES, (smallest - self._num_pages) // max(1, num_rows)))
        if room.prompts is not None and any(kv.is_latent for kv in pools.layers.pools):
            left = room.num_seen - sum(chunk.end for chunk in self.chunks)
            num_rows = min(num_rows, max(1, left // ((1 + of_each) * self._page_size)))
        singles = []
        for nth in range(num_rows):
            # The first run is as long as there is room for, the next one shorter, and so on.
            length, most = longest - nth % longest, of_each * self._page_size
            end = max(self._chance.randrange(most) + 1, min(length, most))
            run = self._chunk(range(max(0, end - length), end), of_each)
            singles.append(replace(run, num_drafts=len(run.token_ids) - 1))
        self.chunks = [*singles, *self.chunks]
        if pools.slots is not None:
            self.chunks = [replace(chunk, slot=nth) for nth, chunk in enumerate(self.chunks)]

    def _chunk(self, positions: range, num_pages: int) -> Chunk:
        own = range(self._num_pages, self._num_pages + num_pages)
        smallest = min(kv.num_pages for kv in self._pools.layers.pools)
        pages = [PageId(page) for page in ((0, *own) if own.stop <= smallest else (0,))]
        start = positions.start + (len(pages) - num_pages) * self._page_size
        self._num_pages = max(self._num_pages, own.stop) if own.stop <= smallest else self._num_pages
        return Chunk(
            [self._chance.randrange(self._vocab_size) for _ in positions],
            start,
            pages,
            True,
            SamplingParams(temperature=0),
            tails=(TailPages(0, pages),) * self._num_tails,
        )

    def fill(self) -> None:
        generator = torch.Generator(self._device).manual_seed(0)
        for kv in self._pools.layers.pools:
            # One page is filled at a time, since all random numbers at once would take more memory than the
            # graphs do.
            for page in kv.numbers[: self._num_pages * kv.shape.page_numbers].view(self._num_pages, -1):
                page.copy_(torch.randn(page.shape, generator=generator, device=self._device))
        if self._pools.slots is not None:
            for name, states in self._pools.slots.of_state.items():
                own = states[: len(self.chunks)]
                own.copy_(torch.randn(own.shape, generator=generator, device=self._device) / 8)
                self._states[name] = own.clone()
        finish_step(self._device)

    def clear(self) -> None:
        for kv in self._pools.layers.pools:
            kv.numbers[: self._num_pages * kv.shape.page_numbers].zero_()
        if self._pools.slots is not None:
            self._pools.slots.zero(range(len(self.chunks)))
        finish_step(self._device)

    def again(self) -> None:
        if self._pools.slots is not None:
            for name, states in self._states.items():
                self._pools.slots.of_state[name][: len(self.chunks)] = states
        finish_step(self._device)

    def states(self) -> list[Tensor]:
        """Return copies of the states of sequences that have a scan or drafts."""
        slots = [chunk.slot for chunk in self.chunks if len(chunk.token_ids) > 1]
        if self._pools.slots is None or not slots:
            return []
        return [states[slots] for states in self._pools.slots.of_state.values()]

    def lose_a_page(self) -> None:
        for kv in self._pools.layers.pools:
            kv.numbers[: kv.shape.page_numbers].zero_()


def _prompt_lengths(room: StepRoom, most_tokens: int) -> list[int]:
    if room.is_scan:
        return [room.num_tokens]
    if not room.num_tokens:
        return []
    tokens = min(room.num_tokens, most_tokens)
    return [max(2, 2 * tokens // 3), *([tokens // 4] if tokens >= 8 else [])]


def rows_to_compare(chunks: Sequence[Chunk]) -> list[list[int]]:
    """Return groups of the step's rows: all single tokens', and some of each prompt's with its last one."""
    ends = list(accumulate((len(chunk.token_ids) for chunk in chunks), initial=0))
    singles = [start for start, end in pairwise(ends) if end - start == 1]
    prompts = [
        sorted({end - 1, *range(start, end, -(-(end - start) // (_ROWS_OF_A_PROMPT - 1)))})
        for start, end in pairwise(ends)
        if end - start > 1
    ]
    return [*([singles] if singles else []), *prompts]


def accepted_of(chunks: Sequence[Chunk]) -> list[int]:
    """Return how many tokens of each chunk with drafts are kept in a trial."""
    return [1 + (nth + 1) % len(chunk.token_ids) for nth, chunk in enumerate(chunks) if chunk.num_drafts]


def worst_state(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the relative error of the middle sequence of each state, for the worst state."""
    errors = [
        ((own.float() - other.float()).flatten(1).norm(dim=1) / other.float().flatten(1).norm(dim=1))
        for own, other in zip(got, expected, strict=True)
    ]
    return _worst_middle(errors)


def worst_error(got: Tensor, expected: Tensor, groups: Sequence[Sequence[int]]) -> float:
    """Return the relative error of the middle row of each group, for the worst group.

    `got` and `expected` have the groups' rows one after the other.
    """
    errors = ((got - expected).square().mean(1) / expected.square().mean(1)).sqrt()
    of_groups = errors.split([len(group) for group in groups])
    return _worst_middle(of_groups)


def _worst_middle(groups: Sequence[Tensor]) -> float:
    """Return NaN where any group's middle is NaN."""
    return float(torch.stack([errors.sort().values[len(errors) // 2] for errors in groups]).max())
