"""A draft model of 100 million parameters is measured by the round: one more token for each sequence."""

from collections.abc import Callable
from pathlib import Path
from statistics import median
from unittest import mock

import torch
from transformers import PreTrainedModel

from bench.engine import FIRST_ID, GREEDY, Pages, seconds
from bench.gpu.captured import finish
from bench.gpu.model import HUNDRED_MILLION, TINY, copied, opened, random_model
from bench.report import Row
from services.engine.paged.model_runner import Chunk
from services.engine.torch import draft as draft_module
from services.engine.torch.draft import DraftModelSettings, TorchDraft
from services.values.kv import PageId

_DRAFTS = 4
_TIMED = 9
_GRAPH_BYTES = 1 << 30


def draft_rows(device: torch.device, batches: tuple[int, ...], context: int) -> list[Row]:
    model = random_model(TINY if device.type == "cpu" else HUNDRED_MILLION, device)
    return [
        row
        for what, budget in (("graphs", _GRAPH_BYTES), ("eager", 0))
        for row in _rows(model, what, budget, batches, context)
    ]


def _rows(
    model: PreTrainedModel, what: str, budget: int, batches: tuple[int, ...], context: int
) -> list[Row]:
    page_size = 64
    room = -(-(context + 1 + _DRAFTS) // page_size)
    draft = _open(model, max(batches) * room, page_size, budget if model.device.type == "cuda" else 0)
    pages = Pages(max(batches) * room, page_size)
    tables = [pages.take(room * page_size) for _ in range(max(batches))]
    rows = []
    for batch in batches:
        step = _propose(draft, tables[:batch], context)
        samples = [_timed(draft, tables[:batch], context, step, model.device) for _ in range(_TIMED)]
        rows.append({"what": f"{what}, batch {batch}", "ms": 1e3 * median(samples[2:]) / _DRAFTS})
    draft.close()
    return rows


def _open(model: PreTrainedModel, num_pages: int, page_size: int, budget: int) -> TorchDraft:
    settings = DraftModelSettings(Path("draft"), self_check=False, max_rows=64)
    with (
        mock.patch.object(draft_module, "open_checkpoint", lambda *_, **__: opened(model)),
        mock.patch.object(draft_module, "load_model", lambda *_, **__: copied(model)),
    ):
        return TorchDraft(
            settings,
            opened(model),
            num_pages=num_pages,
            page_size=page_size,
            device=model.device,
            graph_budget=budget,
        )


def _propose(draft: TorchDraft, tables: list[list[PageId]], context: int) -> Callable[[], object]:
    history = [FIRST_ID + i % 400 for i in range(context + 1)]
    chunks = [Chunk(history[-1:], context, table, True, GREEDY, history, 1) for table in tables]
    return lambda: draft.propose(chunks, [_DRAFTS] * len(chunks))


def _timed(
    draft: TorchDraft,
    tables: list[list[PageId]],
    context: int,
    step: Callable[[], object],
    device: torch.device,
) -> float:
    """Propose anew: the draft lacks the newest token of each sequence and no other."""
    for table in tables:
        draft.validity.lent(table)
        draft.validity.computed(table, 0, context)

    def run() -> None:
        step()
        finish(device)

    return seconds(run)
