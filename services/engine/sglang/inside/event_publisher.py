"""SGLang's KV events of one process go to our service, instead of over ZMQ: in order, and none is lost."""

from typing import Any

import msgspec
from sglang.srt.disaggregation.kv_events import EventPublisher

from services.engine.sglang.inside.door.reporter import process_reporter
from services.engine.sglang.reports import TreeEvents


def publish_events(_result: None, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """Publish after each Scheduler.process_batch_result.

    SGLang itself publishes when it logs, on decode at every 40th step (`--decode-log-interval`).
    """
    scheduler.kv_events_publisher.publish_kv_events()


class TreeEventPublisher(EventPublisher):
    def __init__(self, attn_dp_rank: int, **_zmq_settings: Any) -> None:
        self._dp_rank = attn_dp_rank

    def publish(self, events: Any) -> None:
        process_reporter().report(TreeEvents(self._dp_rank, [msgspec.to_builtins(e) for e in events.events]))

    def shutdown(self) -> None:
        """The reporter ends with its process."""
