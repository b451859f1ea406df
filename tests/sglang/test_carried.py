"""Groups beside full attention, from the plugin's reports to usage; SGLang is an HTTP server."""

from contextlib import aclosing
from types import SimpleNamespace

import pytest

from bench.families import FAMILIES
from engine.sglang.settings import sglang_settings
from engine.sglang.stand_in import OWN, PAGE_BYTES, active, chunk, worker_on
from services.cli.model.make_model import make_model
from services.engine.sglang.reports import Moved, draft_fields, group_fields
from services.engine.sglang.service import launch
from services.engine.sglang.service.sglang_engines import SglangDecodeEngine
from services.engine.sglang.service.sglang_settings import KEEP_WHOLE
from services.engine.sglang.service.worker import SglangWorker
from services.values.errors import ConfigError, PeerFailed
from services.values.kv import DraftKv, GroupKind, KvGroup
from services.values.rank import Generation, RankAddress, RankId, TransferId
from services.values.request import GenerationRequest, PrefillResult, SamplingParams

WINDOW = KvGroup(GroupKind.SLIDING_WINDOW, (0,), 2, 16, "float32", window=32, unit_bytes=100)
STATE = KvGroup(GroupKind.RECURRENT, (1,), 0, 0, "float32", unit_bytes=7000)
CARRIED = [group_fields(WINDOW), group_fields(STATE)]
PROMPT_LEN = 3  # a page, a page of tail, a state
DUE = PAGE_BYTES + 100 + 7000


class Leg:
    peer = RankAddress(RankId("p", 0, Generation(2)), "127.0.0.1:9")

    def __init__(self, kv_bytes_moved):
        self.kv_bytes_moved = kv_bytes_moved

    async def __call__(self, request, rendezvous):
        return PrefillResult(5, None, 0, PROMPT_LEN, kv_bytes_moved=self.kv_bytes_moved)


async def generate(answer):
    answer.write(chunk({"type": "length"}))


async def admitted_of(worker, leg):
    request = GenerationRequest("r", (1, 2, 3), SamplingParams(max_tokens=1, temperature=0))
    async with aclosing(SglangDecodeEngine(worker, OWN).generate(request, leg)) as outputs:
        return (await anext(outputs)).admitted


async def test_tails_and_states_are_due_and_count(checkpoint):
    async with worker_on(generate, checkpoint) as worker:
        worker._take(active(carried=CARRIED))
        assert worker.layout.carried == (WINDOW, STATE)
        admitted = await admitted_of(worker, Leg(DUE))
        assert admitted.kv_bytes_moved == admitted.kv_bytes_prompt == DUE
        assert admitted.carried_bytes == {"sliding_window": 100, "recurrent": 7000}
        with pytest.raises(PeerFailed, match=f"moved {PAGE_BYTES} bytes where {DUE} were due"):
            await admitted_of(worker, Leg(PAGE_BYTES))


DRAFT = DraftKv(5, KvGroup(GroupKind.FULL_ATTENTION, (0,), 1, 32, "float32", unit_bytes=640))


@pytest.mark.parametrize("of_draft", [0, 640], ids=["prefill does not speculate", "both do"])
async def test_a_drafts_kv_counts_where_prefill_has_it_too(checkpoint, of_draft):
    """That it has is told by its bytes alone; a part of it is nothing that can be."""
    async with worker_on(generate, checkpoint) as worker:
        worker._take(active(draft=draft_fields(DRAFT)))
        assert worker.layout.draft == DRAFT
        admitted = await admitted_of(worker, Leg(PAGE_BYTES + of_draft))
        assert admitted.kv_bytes_moved == admitted.kv_bytes_prompt == PAGE_BYTES + of_draft
        assert admitted.carried_bytes == ({"draft": 640} if of_draft else {})
        with pytest.raises(PeerFailed, match=f"where {PAGE_BYTES + 640} or {PAGE_BYTES} were due"):
            await admitted_of(worker, Leg(PAGE_BYTES + 320))


async def test_what_all_processes_have_written_is_one_sum(checkpoint):
    async with worker_on(generate, checkpoint) as worker:
        worker._take(Moved(9, 1, PAGE_BYTES, {"swa": 100, "mamba": 7000}))
        assert await worker.bytes_moved(TransferId(9)) == DUE


@pytest.fixture
def windowed(tmp_path):
    make_model(tmp_path, FAMILIES["gpt_oss"])
    return tmp_path


@pytest.fixture
def asked(monkeypatch):
    """Tell whether SGLang is said to have window memory; how often it was asked."""
    said = SimpleNamespace(has=True, times=0)

    async def has_window_memory(model_path, environment):
        said.times += 1
        return said.has

    monkeypatch.setattr(launch, "has_window_memory", has_window_memory)
    return said


RATIO = "--swa-full-tokens-ratio=0.5"


@pytest.mark.parametrize(
    ("engine_args", "has", "added", "times"),
    [
        ((), True, [KEEP_WHOLE], 1),
        ((), False, [], 1),
        ((KEEP_WHOLE,), True, [], 0),
        ((RATIO,), True, [], 1),
    ],
)
async def test_windows_are_kept_whole_unless_told_otherwise(
    windowed, asked, caplog, engine_args, has, added, times
):
    asked.has = has
    started = launch.Launch(sglang_settings(windowed, engine_arg=engine_args))
    assert await started.window_arguments({}) == added
    assert asked.times == times
    assert ("find nothing on decode" in caplog.text) == (RATIO in engine_args)


async def test_a_model_without_windows_is_not_asked_about(checkpoint, asked):
    assert await launch.Launch(sglang_settings(checkpoint)).window_arguments({}) == []
    assert asked.times == 0


async def test_what_recurrent_layers_cost_is_said_at_the_start(tmp_path, asked, caplog):
    make_model(tmp_path, FAMILIES["qwen3_next"])
    assert await launch.Launch(sglang_settings(tmp_path)).window_arguments({}) == []
    assert "sglang_recurrent" in caplog.text and "--mamba-track-interval" in caplog.text


async def test_where_memory_is_short_the_way_out_is_said(windowed, monkeypatch):
    worker = SglangWorker(sglang_settings(windowed), {0: OWN})
    monkeypatch.setattr(SglangWorker, "_num_pages", lambda self: [100])
    with pytest.raises(ConfigError, match="windows are kept whole: --swa-full-tokens-ratio"):
        worker._check_pools()


async def test_states_of_other_kinds_are_refused(checkpoint):
    async with worker_on(generate, checkpoint) as worker:
        worker._take(active(state_kinds=["swa", "mamba", "swa_ring"]))
        with pytest.raises(ConfigError, match=r"not known here \(swa_ring\)"):
            await worker._until_active()
