"""A scheduler's load is told when it has changed, and the last one always."""

from types import SimpleNamespace

import pytest

from services.engine.sglang.inside import reporter
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
    monkeypatch.setattr(reporter, "process_reporter", lambda: SimpleNamespace(report=told.append))
    yield told
    reporter._published.clear()


def test_the_last_load_before_each_look_is_told_once(told):
    reporter.report_load()
    for running in (1, 2):
        reporter.note_load(Snapshot(running), "the scheduler", force=True)
    reporter.note_load(None)  # it did not publish
    reporter.report_load()
    reporter.report_load()
    reporter.note_load(Snapshot(0))
    reporter.report_load()
    assert told == [Load({"dp_rank": 1, "num_running_reqs": running}) for running in (2, 0)]
