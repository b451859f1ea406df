"""The stages divide the time to a request's first token. They are pure.

    received --> tokenized --> placed --> Start sent --> (decode rank) --> first token received
    |------------ router ------------------------------|--- rank_s ---|

Each stage is the difference of two times on one clock, so their sum is the time to the first token, whatever
the ranks' clocks show. They are in a request's order.
"""

from collections.abc import Iterator
from typing import NamedTuple

from services.values.request import Admitted


class Stages(NamedTuple):
    """Each is in seconds; a stage that did not happen is 0."""

    router_queue_s: float = 0.0  # This is the time at failed ranks, and of waiting on the router.
    tokenize_s: float = 0.0
    route_s: float = 0.0
    decode_queue_s: float = 0.0
    prefill_queue_s: float = 0.0
    pull_s: float = 0.0
    prefill_compute_s: float = 0.0
    transfer_s: float = 0.0
    first_decode_step_s: float = 0.0
    relay_s: float = 0.0  # This is the time between router and decode rank, both ways.

    def seconds(self) -> Iterator[tuple[str, float]]:
        return zip(STAGES, self, strict=True)


STAGES = tuple(name.removesuffix("_s") for name in Stages._fields)


def stages_of(
    *, tokenize_s: float, route_s: float, sent_s: float, first_token_s: float, admitted: Admitted
) -> Stages:
    """Return the stages. `sent_s`, the time of sending to the rank that answered, and `first_token_s` count
    from the request's arrival."""
    return Stages(
        router_queue_s=max(0.0, sent_s - tokenize_s - route_s),
        tokenize_s=tokenize_s,
        route_s=route_s,
        decode_queue_s=admitted.decode_queue_s,
        prefill_queue_s=admitted.prefill_queue_s,
        pull_s=0.0 if admitted.pulled is None else admitted.pulled.seconds,
        prefill_compute_s=admitted.prefill_compute_s,
        transfer_s=admitted.transfer_s,
        first_decode_step_s=admitted.first_decode_step_s,
        relay_s=max(0.0, first_token_s - sent_s - admitted.rank_s),
    )
