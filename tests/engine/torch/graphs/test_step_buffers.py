"""A step that goes on where the last one ended is written as a step of its own would be."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.torch.attention.paging import empty
from services.engine.paged.model_runner import Chunk
from services.engine.torch.attention.page_pieces import OnDevice
from services.engine.torch.attention.paged_kv import PageShape
from services.engine.torch.attention.step_view import LayerPlace, PagedLayers, Reach
from services.engine.torch.step_buffers import StepBuffers
from services.engine.torch.step_rooms import StepOutputs, StepRoom
from services.kv.prefix_cache import PrefixCache, SequencePages
from services.values.kv import GroupKind
from services.values.request import SamplingParams

PAGE_SIZE, NUM_PAGES, MAX_ROWS = 4, 200, 8
GREEDY = SamplingParams(temperature=0)
WINDOW = Reach(0, GroupKind.SLIDING_WINDOW, 7)


def buffers_of(reaches, num_rows=MAX_ROWS):
    kv = empty(PageShape(1, 2, PAGE_SIZE, 1, 1), dtype=torch.float32, num_pages=NUM_PAGES)
    in_place = OnDevice(lambda *_: None, 4, num_programs=24)
    places = {layer: LayerPlace(reach, 0) for layer, reach in enumerate(reaches)}
    layers = PagedLayers((kv,), (in_place,), places)
    outputs = StepOutputs(layers, num_rows, torch.device("cpu"))
    return StepBuffers(SimpleNamespace(layers=layers, slots=None), StepRoom(num_rows), outputs)


def written(buffers):
    """Return all that a graph reads of the step."""
    used = {"token_ids": buffers.token_ids.tolist(), "positions": buffers.positions.tolist()}
    for reach, view in buffers.views.items():
        parts = view.decode.parts[: int(view.decode.counts[1])].tolist()
        num_pages, num_readers = max(part[1] for part in parts), max(part[3] for part in parts)
        used[reach] = (
            [tensor.tolist() for tensor in (*view.static_slots, view.decode.starts, view.decode.ends)],
            view.decode.counts.tolist(),
            parts,
            view.decode.pages[min(part[0] for part in parts) : num_pages].tolist(),
            view.decode.readers[:num_readers].tolist(),
            view.decode.readings[: int(view.decode.ends.max())].tolist(),
        )
    return used


@dataclass(eq=False)
class Row:
    pages: SequencePages
    ids: list[int] = field(default_factory=list)

    def chunk(self):
        start, table = len(self.ids) - 1, list(self.pages.pages)
        return Chunk(self.ids[-1:], start, table, True, GREEDY, table=self.pages.table)


class Steps:
    """Sequences that decode, over the pages of a real cache."""

    def __init__(self, reaches):
        self.cache = PrefixCache(NUM_PAGES, PAGE_SIZE, PAGE_SIZE, "m")
        self.rows, self.drafting = [], None
        self.going_on, self.anew = buffers_of(reaches), buffers_of(reaches)
        self.read = {}  # It has the pages that were read last, by table.

    def begin(self, ids):
        pages = self.cache.open(ids, "", len(ids) - 1)
        self.rows.append(Row(pages, list(ids)))
        self.grow(self.rows[-1])
        self.cache.publish(pages, ids[:-1])

    def end(self, row):
        self.rows.remove(row)
        self.cache.close(row.pages)
        self.drafting = None if self.drafting is row else self.drafting

    def grow(self, row, more=0):
        missing = -(-(len(row.ids) + more) // PAGE_SIZE) - len(row.pages.pages)
        assert self.cache.extend(row.pages, max(0, missing))

    def step(self, token_ids, keeps=False):
        """`token_ids` has what each row goes on with."""
        chunks = []
        for row in self.rows:
            self.grow(row, more=row is self.drafting)
            chunks.append(row.chunk())
            before = self.read.get(row.pages.table, [])
            assert chunks[-1].pages[: len(before)] == before
            self.read[row.pages.table] = chunks[-1].pages
        if self.drafting is not None:
            [own] = [chunk for chunk in chunks if chunk.table is self.drafting.pages.table]
            chunks.append(replace(own, start=own.start + 1))
        assert self.going_on.fill(chunks)
        assert self.anew.fill([replace(chunk, table=None) for chunk in chunks])
        assert written(self.going_on) == written(self.anew)
        for row, own in zip(self.rows, token_ids, strict=True):
            self.cache.publish(row.pages, row.ids, keep_duplicates=keeps)
            needed = -(-len(row.ids) // PAGE_SIZE)
            if len(row.pages.pages) > needed:
                self.cache.shorten(row.pages, needed)
            row.ids += own
            self.grow(row)


@pytest.mark.exact
@given(
    data=st.data(), reaches=st.sampled_from([[Reach(0)], [Reach(0), WINDOW], [WINDOW, Reach(0)], [WINDOW]])
)
def test_it_is_written_as_a_new_one(data, reaches):
    """Sequences share what they began with, come, go, draft, and find that others have computed the same."""
    steps, ids = Steps(reaches), st.sampled_from([1] * 12 + [2])
    for _ in range(data.draw(st.integers(1, 30))):
        # Most steps only go on.
        what = data.draw(st.sampled_from(["on"] * 12 + ["comes"] * 3 + ["goes", "moves", "jumps", "drafts"]))
        if (what == "comes" or not steps.rows) and len(steps.rows) < MAX_ROWS - 1:
            steps.begin([1] * data.draw(st.integers(1, 20)) + [data.draw(ids)])
        row = steps.rows[data.draw(st.integers(0, len(steps.rows) - 1))]
        if what == "goes" and len(steps.rows) > 1:
            steps.end(row)
        if what == "moves":
            steps.rows.reverse()
        if what == "drafts":
            steps.drafting = None if steps.drafting is not None else row
        counts = [2 if what == "jumps" and each is row else 1 for each in steps.rows]
        token_ids = [[data.draw(ids) for _ in range(count)] for count in counts]
        steps.step(token_ids, keeps=data.draw(st.integers(0, 3)) == 0)


def test_a_plan_is_made_only_where_rows_or_pages_changed_hands(monkeypatch):
    steps = Steps([Reach(0)])
    for nth in range(3):
        steps.begin([1] * (11 + nth))
    plans = []
    own = StepBuffers._plan
    monkeypatch.setattr(StepBuffers, "_plan", lambda self, *args: plans.append(self) or own(self, *args))
    for nth in range(30):
        steps.step([[2 + nth], [102 + nth], [202 + nth]], keeps=True)
    assert plans.count(steps.going_on) == 1
    assert plans.count(steps.anew) == 30
