"""A scheduler's load is told when it has changed, and the last one always."""

from types import SimpleNamespace

import pytest

from services.engine.sglang.inside.door import load_reports
from services.engine.sglang.reports import Load


class Snapshot:
    def __init__(self, running):
        self.running = running

    def to_dict(self, sections):
        assert sections == {"core", "disagg"}
        return {"dp_rank": 1, "num_running_reqs": self.running}


@pytest.fixture
def told(monkeypatch):
    told = []
    monkeypatch.setattr(load_reports, "process_reporter", lambda: SimpleNamespace(report=told.append))
    yield told
    load_reports._published.clear()


def test_the_last_load_before_each_look_is_told_once(told):
    load_reports.tell_load()
    for running in (1, 2):
        load_reports.note_load(Snapshot(running), "the scheduler", force=True)
    load_reports.note_load(None)  # it did not publish
    load_reports.tell_load()
    load_reports.tell_load()
    load_reports.note_load(Snapshot(0))
    load_reports.tell_load()
    assert told == [Load({"dp_rank": 1, "num_running_reqs": running}) for running in (2, 0)]
