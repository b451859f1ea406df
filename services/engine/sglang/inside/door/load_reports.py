"""A rank's load as its scheduler publishes it, told a few times a second. SGLang would tell it over HTTP."""

from typing import Any

from services.engine.sglang.inside.door.reporter import process_reporter
from services.engine.sglang.reports import Load

LOAD_S = 0.25  # between two looks; a scheduler publishes at every few steps, and spinning all the time
_SECTIONS = {"core", "disagg"}

_published: list[Any] = []  # the last one that has not been told


def note_load(snapshot: Any, *_args: Any, **_kwargs: Any) -> None:
    """After Scheduler.publish_load_snapshot, which returns none where it does not publish."""
    if snapshot is not None:
        _published[:] = [snapshot]


def tell_load() -> None:
    """On a thread of ours, so that the last one before a rest is told, too."""
    if _published:
        process_reporter().report(Load(_published.pop().to_dict(_SECTIONS)))
