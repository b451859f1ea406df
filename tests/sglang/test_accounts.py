"""These tests show what a request on SGLang is said to have cost; SGLang itself is a list of chunks."""

from types import SimpleNamespace

import pytest

from engine.sglang.settings import sglang_settings
from services.engine.sglang.reports import Load, TicketSent
from services.kv.transfer_plan import moved_bytes
from services.values.kv import KvLayout
from services.values.rank import Generation, RankAddress, RankId
from services.values.request import GenerationRequest, PrefillResult, SamplingParams

OWN = RankId("w", 0, Generation(1))
LAYOUT = KvLayout(page_size=16, page_bytes=64, model_fingerprint=7)


def chunk(token, retractions=0, finish=None):
    meta_info = {"finish_reason": finish and {"type": finish}, "num_retractions": retractions}
    return {"output_ids": [token], "meta_info": meta_info}


class Sglang:
    """By the door: answers with `chunks`, and reserves pages once `reserve` is called."""

    def __init__(self, chunks):
        self.chunks, self.bodies = chunks, []

    async def stream(self, body, telling=None, needs=None):
        self.bodies.append(body)
        await self.reserve(body["bootstrap_room"])
        for each in self.chunks:
            yield each


@pytest.fixture
def rank(checkpoint, monkeypatch):
    """(engine, worker, clock) of a decode rank that has started; `clock.now` is the time."""
    from services.engine.sglang.service import process_connections, sglang_engines, worker

    clock = SimpleNamespace(now=100.0)
    for module in (sglang_engines, process_connections, worker):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    own = worker.SglangWorker(sglang_settings(checkpoint), {0: OWN})
    monkeypatch.setattr(worker.SglangWorker, "layout", LAYOUT)
    return sglang_engines.SglangDecodeEngine(own, OWN), own, clock


class Leg:
    """The prefill leg."""

    peer = RankAddress(RankId("p", 0, Generation(2)), "127.0.0.1:1")

    def __init__(self, queue_s, compute_s):
        self.queue_s, self.compute_s = queue_s, compute_s

    async def __call__(self, request, rendezvous):
        num_tokens = len(request.all_ids)
        moved = sum(moved_bytes(0, num_tokens, LAYOUT))
        return PrefillResult(7, None, 0, num_tokens, moved, queue_s=self.queue_s, compute_s=self.compute_s)


async def outputs(engine, leg):
    request = GenerationRequest("r", tuple(range(3, 20)), SamplingParams(temperature=0, max_tokens=4))
    return [output async for output in engine.generate(request, leg)]


@pytest.mark.parametrize(
    ("told", "queue_s", "compute_s", "transfer_s"),
    [((1, 2), 1, 2, 1), ((0, 4), 0, 4, 0), ((0, 9), 0, 4, 0), ((9, 9), 4, 0, 0)],
)
async def test_a_request_s_time_is_told_apart(rank, told, queue_s, compute_s, transfer_s):
    """Also where prefill's clock says that it took longer than it can have."""
    engine, worker, clock = rank
    worker._door = sglang = Sglang([chunk(7, finish="length")])

    async def reserve(transfer_id):
        clock.now += 5  # in decode's queue
        worker._take(TicketSent(transfer_id, 0, 2))
        clock.now += 4  # until the delta has landed

    sglang.reserve = reserve
    (first,) = await outputs(engine, Leg(*told))
    admitted = first.admitted
    assert admitted.decode_queue_s == 5
    assert (admitted.prefill_queue_s, admitted.prefill_compute_s) == (queue_s, compute_s)
    assert admitted.transfer_s == transfer_s
    assert admitted.rank_s == 9


async def test_retractions_are_those_of_all_requests(rank):
    engine, worker, _ = rank

    async def reserve(transfer_id):
        worker._take(TicketSent(transfer_id, 0, 2))

    for counts in ((0, 0, 1), (0, 2, 2)):
        *running, last = counts
        worker._door = sglang = Sglang([*(chunk(7, count) for count in running), chunk(7, last, "length")])
        sglang.reserve = reserve
        await outputs(engine, Leg(0, 0))
    assert worker.load(0).retractions == 3


def test_each_rank_s_load_is_what_its_scheduler_told_last(checkpoint):
    from services.engine.sglang.service.worker import SglangWorker

    worker = SglangWorker(sglang_settings(checkpoint, dp_size=2), {0: OWN, 1: OWN})
    moments = ([10, 20, 1e5], [30, 60, 5e5])  # steps, their sizes, their microseconds
    for running, moment in zip((3, 1), moments, strict=True):
        worker._take(Load({"dp_rank": 1, "num_running_reqs": running, "decode_moments": moment}))
    assert (worker.load(0).running, worker.load(1).running) == (0, 1)
    assert worker.load(0).step_s == 0 and worker.load(1).step_s == pytest.approx(0.012)
