"""A router's own record of its requests, and who may ask for it."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from opentelemetry.trace import INVALID_SPAN

from router.cluster.fake_mirror import D0, D1, P0, FakeMirror, cluster_of, started, view
from services.router.callers import Caller, calling
from services.router.generation_service import GenerationService
from services.router.observed_load import ObservedLoad, fitting
from services.router.ranks.balance import Balance
from services.router.replay.messages import load_from_proto, load_to_proto
from services.router.replay.observed import Observation, Observed, anonymous
from services.router.request.client_request import ClientRequest
from services.router.request.progress import Progress
from services.values.errors import Forbidden, NotFound
from services.values.rank import Plan, Role
from services.values.rank_reports import NO_TENANT_TURNS, REMOTE_ONLY, RankLoad
from services.values.request import Admitted, SamplingParams
from services.wire.isthmus.v1 import generation_pb2

ADMITTED = Admitted(40, 16, 0, 40, 0, 0, 0.5, 0.25, 1.0, 0.125, Plan.REMOTE)


def served(began_s: float, tokens: int, hashes=(7, 8), conversation_id="c", attempts=1) -> Progress:
    """Return a request that got its first token after two seconds, and the others after three."""
    asked = ClientRequest("r", SamplingParams(), conversation_id, "acme", model="m")
    progress, placed = Progress(asked, began_s, INVALID_SPAN), MagicMock()
    placed.prompt.hashes = hashes
    for _ in range(attempts):
        progress.attempt()
    progress.place(placed)
    progress.sent(began_s + 0.0625)
    progress.admit(ADMITTED)
    progress.add_tokens(range(1), began_s + 2.0)
    progress.add_tokens(range(1, tokens), began_s + 3.0)
    return progress


async def test_what_a_router_saw_of_its_requests(subtests):
    balance, mirror, now = Balance(lambda: 0.0), FakeMirror(), [100.0]
    mirror.set(P0, D0, replace(D1, registration=replace(D1.registration, draining=True)))
    async with started(cluster_of(mirror, balance)) as cluster:
        running = [served(97.0, 3)]
        model = SimpleNamespace(name="m", cluster=cluster, generator=SimpleNamespace(running=running))
        models = SimpleNamespace(default=model, others={})
        load = ObservedLoad(models, 60.0, lambda name: 3, lambda: now[0])
        load.note(served(90.0, 5), "finished")
        load.note(Progress(ClientRequest("r", SamplingParams()), 91.0, INVALID_SPAN), "Unavailable")
        load.note(served(92.0, 5, conversation_id="", attempts=2), "cancelled")
        with subtests.test("those that ended, and those that run, and none that no rank began"):
            seen = load.observation(model)
            first, alone, runs = seen.requests
            assert [each.arrival_s for each in seen.requests] == [90.0, 92.0, 97.0]
            assert (first.prompt_tokens, first.output_tokens, first.computed_tokens) == (40, 5, 40)
            assert (first.moved_tokens, first.ttft_s, first.duration_s) == (24, 2.0, 3.0)
            assert (first.queue_s, first.compute_s, first.transfer_s) == (0.75, 1.0, 0.125)
            assert first.is_remote and first.is_over and list(first.blocks) == [7, 8]
            assert not runs.is_over and runs.output_tokens == 3
            queued = Progress(
                ClientRequest("r", SamplingParams(), "c", "acme", model="m"), 99.0, INVALID_SPAN
            )
            running.append(queued)
            assert len(load.observation(model).requests) == 3  # It is not placed, and its prompt not known.
            queued.place(MagicMock())
            waits = load.observation(model).requests[-1]
            assert (waits.arrival_s, waits.ttft_s, waits.duration_s, waits.is_over) == (99.0, 0.0, 1.0, False)
            running.pop()
            assert first.conversation == runs.conversation != 0 == alone.conversation
            assert alone.queue_s == 0.75 + 0.0625  # at a rank that failed
        with subtests.test("the ranks that take requests"):
            balance.report(D0.registration.id.key, RankLoad(step_s=0.02, prefill_tokens_per_s=900.0))
            fleet = load.observation(model).fleet
            assert (fleet.prefill, fleet.decode, fleet.routers, fleet.block_tokens) == (1, 1, 3, 16)
            assert (fleet.decode_pool_tokens, fleet.kv_bytes_per_token) == (1_600, 64.0)
            assert (fleet.tokens_per_s, fleet.step_s, fleet.plans) == (900.0, 0.02, frozenset(Plan))
            assert not fleet.computes_in_order
            mirror.set(view(Role.DECODE, 2, capabilities=(REMOTE_ONLY, NO_TENANT_TURNS)))
            assert load.observation(model).fleet.plans == {Plan.REMOTE}
            assert load.observation(model).fleet.computes_in_order
        with subtests.test("a message tells the same, but for the names"):
            service = GenerationService(models, None, None, load)
            asked = generation_pb2.ListLoadRequest(salt=11)
            with calling(Caller(is_operator=True)):
                (told,) = (await service.ListLoad(asked, None)).models
            seen = load.observation(model)
            assert load_from_proto(told) == Observation(
                seen.fleet,
                [replace(each, blocks=list(each.blocks)) for each in anonymous(seen.requests, 11, 100.0)],
            )
        for what, caller, request, error in [
            ("a tenant's key", Caller("acme"), asked, Forbidden),
            ("a key of neither", Caller(), asked, Forbidden),
            ("another model", Caller(is_operator=True), generation_pb2.ListLoadRequest(model="x"), NotFound),
        ]:
            with subtests.test(what), calling(caller), pytest.raises(error):
                await service.ListLoad(request, None)
        with subtests.test("a router that remembers none"), pytest.raises(NotFound, match="--plan-window-s"):
            await GenerationService(models, None).ListLoad(asked, None)
        with subtests.test("what is older than the window is forgotten"):
            now[0] = 1_000.0
            assert not load.observation(model).requests  # Nor does one that still runs stretch the window.
        with subtests.test("of very many that run the last ones count"):
            running += [served(950.0 + n / 100, 2) for n in range(1_000)]
            ages = [now[0] - each.arrival_s for each in load.observation(model).requests]
            assert len(ages) == 800 and max(ages) < 48.5


def test_an_answer_has_no_more_requests_than_a_message_holds(subtests):
    largest = Observed(-1e9, *[2**32 - 1] * 5, *[1e9] * 5, True, False, 2**64 - 1, [2**64 - 1] * 1_000)
    fleet = load_from_proto(generation_pb2.ModelLoad(model="m")).fleet

    def models(*counts):
        return [Observation(fleet, [replace(largest, arrival_s=n) for n in range(count)]) for count in counts]

    for counts, most_bytes, fit in [
        ((10, 10), 200_000, (10, 10)),
        ((3, 40, 40), 200_000, (3, 10, 11)),
        ((40, 3, 4), 200_000, (17, 3, 4)),
        ((40,), 5_000, (0,)),
        ((5,) * 40, 200_000, None),
    ]:
        with subtests.test(counts=counts):
            told = fitting(models(*counts), most_bytes)
            assert fit is None or tuple(len(each.requests) for each in told) == fit
            for seen, each in zip(models(*counts), told, strict=True):
                assert each.requests == seen.requests[len(seen.requests) - len(each.requests) :]
            requests = [r for each in told for r in load_to_proto(each).requests]
            assert sum(request.ByteSize() + 4 for request in requests) <= most_bytes
