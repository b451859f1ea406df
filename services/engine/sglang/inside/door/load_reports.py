"""A rank's load, as its scheduler publishes it, is reported a few times a second. SGLang would tell it over
HTTP."""

from typing import Any

from services.engine.sglang.inside.door.reporter import process_reporter
from services.engine.sglang.reports import Load

LOAD_S = 0.25  # Between looks. A scheduler publishes at every few steps, and spinning all the time.
_SECTIONS = {"core", "disagg"}

_published: list[Any] = []  # The last one that has not been reported is here.


def note_load(snapshot: Any, *_args: Any, **_kwargs: Any) -> None:
    """Note the load, after Scheduler.publish_load_snapshot, which returns none where it does not publish."""
    if snapshot is not None:
        _published[:] = [snapshot]


def tell_load() -> None:
    """Report it, on a thread of ours, so that the last one before a rest is reported, too."""
    if _published:
        process_reporter().report(Load(_published.pop().to_dict(_SECTIONS)))
