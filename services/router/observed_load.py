"""A router remembers the requests of the last minutes, for `isthmus plan` and its own plan (plan_loop.py).

    request ends --> Recorder of its model --+
    requests that run ----------------------+--> Observation --> ListLoad, with names of its own
    ranks, as they register and report -----+

A request costs a record when it ends. Nothing is remembered with --plan-window-s=0.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import fmean

from xxhash import xxh3_64_intdigest

from services.index.read.mirror import RankView
from services.kv.tails import carried_bytes
from services.net.channels import MAX_MESSAGE_BYTES
from services.router.cluster import RankStatus
from services.router.models import Models
from services.router.placement.rank_snapshot import staying
from services.router.replay.messages import load_to_proto
from services.router.replay.observed import Fleet, Observation, Observed, Recorder, anonymous
from services.router.replay.planner import MOST_REQUESTS
from services.router.request.progress import Progress
from services.router.served_model import Model
from services.values.errors import NotFound
from services.values.rank import Plan, Role
from services.values.rank_reports import NO_TENANT_TURNS, REMOTE_ONLY, Registration
from services.wire.isthmus.v1 import generation_pb2

_MOST_TOLD_BYTES = MAX_MESSAGE_BYTES * 3 // 4
_REQUEST_BYTES = 128  # A request's message has no more, beside its blocks.
_USUAL_TOKENS = 4_096  # What is carried is much the same for any prompt as long as its windows.


class ObservedLoad:
    """The router's loop owns it. `num_routers` returns how many routers serve a model."""

    def __init__(
        self,
        models: Models,
        window_s: float,
        num_routers: Callable[[str], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._models = models
        self._window_s = window_s
        self._num_routers = num_routers
        self._clock = clock
        self._recorders: dict[str, Recorder] = {}

    def note(self, progress: Progress, outcome: str) -> None:
        """Remember a request that has ended, if a rank had begun to answer it."""
        if seen := observed(progress, is_over=True):
            recorder = self._recorders.get(progress.request.model)
            if recorder is None:
                self._forget_models()
                recorder = self._recorders[progress.request.model] = Recorder(self._window_s)
            for each in seen:
                recorder.add(each)

    def _forget_models(self) -> None:
        served = {model.name for model in self._served()}
        self._recorders = {name: each for name, each in self._recorders.items() if name in served}

    def _served(self) -> Sequence[Model]:
        return self._models.default, *self._models.others.values()

    def observation(self, model: Model) -> Observation:
        """Return what was seen of a model's requests of the window, at times of this router's clock; of those
        that run the last ones, too."""
        recorder = self._recorders.get(model.name)
        now = self._clock()
        requests = [] if recorder is None else recorder.recent(now, MOST_REQUESTS)
        running = [each for each in model.generator.running if each.began_s >= now - self._window_s]
        for progress in sorted(running, key=lambda each: each.began_s)[-MOST_REQUESTS:]:
            requests += observed(progress, is_over=False) or waiting(progress, now)
        return Observation(self._fleet(model), requests)

    def _fleet(self, model: Model) -> Fleet:
        cluster, settings = model.cluster, model.cluster.settings
        decodes, prefills = (_taking(cluster.ranks(role)) for role in (Role.DECODE, Role.PREFILL))
        plans = settings.plans
        if any(REMOTE_ONLY in rank.capabilities for rank in decodes):
            plans -= {Plan.LOCAL}
        layouts = [rank.layout for rank in (*decodes, *prefills)]
        status = cluster.status()
        return Fleet(
            model.name,
            len(prefills),
            len(decodes),
            self._num_routers(model.name),
            settings.placer.index_block,
            settings.placer.chunk_tokens,
            _pool_tokens(prefills),
            _pool_tokens(decodes),
            _mean([layout.page_bytes / layout.page_size for layout in layouts]),
            round(_mean([carried_bytes(layout, _USUAL_TOKENS) for layout in layouts])),
            plans,
            self._window_s,
            _mean([each.now.tokens_per_s for each in status if each.now.is_measured]),
            _mean(list(_steps_s(status))),
            # Such an engine has an order of its own, which is that of arrival.
            any(NO_TENANT_TURNS in rank.capabilities for rank in (*decodes, *prefills)),
        )

    async def list_load(self, request: generation_pb2.ListLoadRequest) -> generation_pb2.ListLoadResponse:
        """Answer with names that the caller's salt makes, which are made off the loop, and with no more
        requests than a message holds. Raises NotFound."""
        chosen = [model for model in self._served() if request.model in ("", model.name)]
        if not chosen:
            raise NotFound(f"model {request.model!r} is not served here")
        now, seen = self._clock(), [self.observation(model) for model in chosen]
        return await asyncio.to_thread(_told, fitting(seen), request.salt, now)


def fitting(seen: Sequence[Observation], most_bytes: int = _MOST_TOLD_BYTES) -> list[Observation]:
    """Return the last requests of each model, so that the messages of all have no more than `most_bytes`.

    What a model does not need of its share the others have.
    """
    sizes = [sum(map(_told_bytes, each.requests)) for each in seen]
    fit = list(seen)
    smallest_first = sorted(range(len(seen)), key=lambda place: sizes[place])
    for models_left, place in zip(range(len(seen), 0, -1), smallest_first, strict=True):
        requests = _last(fit[place].requests, most_bytes // models_left)
        fit[place] = replace(fit[place], requests=requests)
        most_bytes -= sum(map(_told_bytes, requests))
    return fit


def _last(requests: Sequence[Observed], most_bytes: int) -> Sequence[Observed]:
    sizes = accumulate(map(_told_bytes, reversed(requests)))
    count = sum(size <= most_bytes for size in sizes)
    return requests[len(requests) - count :]


def _told_bytes(seen: Observed) -> int:
    return _REQUEST_BYTES + 8 * len(seen.blocks)


def _told(seen: Sequence[Observation], salt: int, now: float) -> generation_pb2.ListLoadResponse:
    named = [replace(each, requests=list(anonymous(each.requests, salt, now))) for each in seen]
    return generation_pb2.ListLoadResponse(models=map(load_to_proto, named))


def observed(progress: Progress, *, is_over: bool) -> list[Observed]:
    """Return what is known of a request's answers. All but the first found its prompt at their rank."""
    found = []
    for answer in progress.answers:
        admitted = answer.admitted
        if admitted is None or answer.first_token_s is None or answer.stages is None:
            continue
        queue_s = admitted.decode_queue_s + admitted.prefill_queue_s
        if answer.attempts > 1:  # The time at ranks that failed is no part of a plan.
            queue_s += answer.stages.router_queue_s
        seen = Observed(
            answer.began_s,
            admitted.prompt_tokens,
            len(answer.output_ids),
            admitted.computed_tokens,
            admitted.reused_tokens,
            admitted.delta_tokens,
            answer.first_token_s,
            answer.last_tokens_at_s - answer.began_s,
            queue_s,
            admitted.prefill_compute_s,
            admitted.transfer_s,
            admitted.plan is Plan.REMOTE,
            is_over,
            _conversation(answer),
            answer.served[0].placed.prompt.hashes,
        )
        found.append(seen)
    return found


def waiting(progress: Progress, now: float) -> list[Observed]:
    """Return a request that a rank has not answered yet: it is load, too."""
    if progress.placed is None:
        return []
    waits_s, hashes = now - progress.began_s, progress.placed.prompt.hashes
    tokens = progress.prompt_tokens, 0, 0, 0, 0
    times = 0.0, waits_s, 0.0, 0.0, 0.0
    return [Observed(progress.began_s, *tokens, *times, False, False, _conversation(progress), hashes)]


def _conversation(progress: Progress) -> int:
    request = progress.request
    if not request.conversation_id:
        return 0
    return xxh3_64_intdigest(f"{request.tenant}\0{request.conversation_id}".encode())


def _taking(views: Sequence[RankView]) -> Sequence[Registration]:
    return staying([view.registration for view in views])


def _pool_tokens(ranks: Sequence[Registration]) -> int:
    return round(_mean([rank.total_pages * rank.layout.page_size for rank in ranks]))


def _steps_s(status: Sequence[RankStatus]) -> Iterator[float]:
    for each in status:
        if each.view.registration.role is Role.DECODE and each.now.load.step_s > 0:
            yield each.now.load.step_s


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
