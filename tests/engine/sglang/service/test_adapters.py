"""Adapters for SGLang are read here, and come and go in a scheduler, which the test is."""

import asyncio
import json
from contextlib import aclosing
from dataclasses import replace

import pytest

from exactness.adapters import adapter_of
from exactness.checkpoints import tiny_checkpoint
from services.engine.paged.shell.adapting import Adapting
from services.engine.sglang.reports import (
    Abort,
    AdapterChanged,
    Generate,
    LoadAdapter,
    Outputs,
    UnloadAdapter,
)
from services.engine.sglang.service.adapters import SchedulerLoader, lora_arguments, lora_id, read_adapter
from services.engine.sglang.service.process_connections import Door, Needs
from services.model.lora import CONFIG
from services.values.adapter import Adapter
from services.values.errors import ConfigError, Unavailable
from services.values.request import GenerationRequest, SamplingParams

DIGEST = "0" * 32


@pytest.fixture(scope="module")
def directory():
    return adapter_of(tiny_checkpoint(), "sglang", ("q_proj", "v_proj", "down_proj"), rank=3)


def test_what_sglang_would_compute_wrong_is_refused(subtests, directory, tmp_path):
    read = read_adapter("a", directory)
    assert read.adapter.name == "a" and len({read.adapter.digest, DIGEST}) == 2
    told = json.loads((directory / CONFIG).read_text())
    for name, content in {
        "use_rslora": {"use_rslora": True},
        "alpha_pattern": {"alpha_pattern": {"q_proj": 1}},
        "rank_pattern": {"r": 4, "rank_pattern": {"[qv]_proj": 3, "down_proj": 3}},
        "only LORA": {"peft_type": "LOHA"},
    }.items():
        changed = tmp_path / name
        changed.mkdir()
        for file in directory.iterdir():
            (changed / file.name).symlink_to(file)
        (changed / CONFIG).unlink()
        (changed / CONFIG).write_text(json.dumps(told | content))
        with subtests.test(name), pytest.raises(ConfigError, match=f"adapter a of .*{name}"):
            read_adapter("a", changed)
    for fused in (("q_proj", "k_proj", "o_proj"), ("v_proj", "gate_proj")):
        part = adapter_of(tiny_checkpoint(), "part", fused)
        with subtests.test(fused), pytest.raises(ConfigError, match=r"layers\.0\.self_attn without both"):
            read_adapter("a", part)


def test_memory_is_reserved_for_the_adapters_of_the_start_and_for_usual_ones_if_more_may_come(directory):
    own = lora_arguments({"a": directory}, loads_later=False)
    assert "--max-lora-rank=3" in own
    assert own[-4:] == ["--lora-target-modules", "down_proj", "q_proj", "v_proj"]
    later = lora_arguments({}, loads_later=True)
    assert "--max-lora-rank=64" in later and {"k_proj", "up_proj"} < {*later}


class Worker:
    """It has one scheduler, which refuses a name."""

    def __init__(self, refused=""):
        self.door, self.orders = Door(), []
        self.refused = refused
        self.door.connect(0, self.take)

    def take(self, order):
        self.orders.append(order)
        if isinstance(order, LoadAdapter | UnloadAdapter):
            error = "no" if order.name == self.refused else ""
            asyncio.get_running_loop().call_soon(self.door.changed, AdapterChanged(order.change, error))

    async def change(self, dp_rank, order):
        await self.door.change(dp_rank, order)


def end_of(rid):
    return Outputs([{"rid": rid, "output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}}])


async def test_an_adapter_stays_until_sglang_has_ended_its_last_request(directory):
    worker = Worker(refused="b")
    adapting = Adapting(SchedulerLoader(worker, 0))
    with pytest.raises(ConfigError, match="SGLang refuses adapter b: no"):
        await adapting.load("b", directory)
    adapter = await adapting.load("a", directory)
    assert adapting.loaded == (adapter,) and worker.orders[-1].lora_id == lora_id(adapter)
    request = GenerationRequest("r", (1, 2), SamplingParams(), adapter=adapter)
    needs = Needs(lambda: adapting.entered(request), lambda: adapting.left(request))
    body = {"rid": "r", "routed_dp_rank": 0}
    async with aclosing(worker.door.stream(body, needs=needs)) as chunks:
        waiting = asyncio.create_task(anext(chunks))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert worker.orders[-2:] == [Generate(body), Abort("r")]
    unloading = asyncio.create_task(adapting.unload("a"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert worker.orders[-1] == Abort("r"), "SGLang still computes with it"
    with pytest.raises(Unavailable, match="is not loaded"):
        async with aclosing(worker.door.stream({**body, "rid": "s"}, needs=needs)) as chunks:
            await anext(chunks)
    worker.door.take(end_of("r"))
    await unloading
    assert type(worker.orders[-1]) is UnloadAdapter and adapting.loaded == ()


def test_ids_are_those_of_names_and_weights():
    adapter = Adapter("a", DIGEST)
    assert lora_id(adapter) == lora_id(Adapter("a", DIGEST))
    assert len({lora_id(each) for each in (adapter, replace(adapter, name="b"), Adapter("a", "1" * 32))}) == 3
