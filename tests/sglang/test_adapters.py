"""LoRA adapters on SGLang are models of their own: exact, with KV that nobody else reads."""

import asyncio

import pytest

from engine.sglang.random_ids import random_ids
from exactness.adapters import adapter_of, merged
from exactness.checkpoints import tiny_checkpoint
from exactness.reference import NEAR_TIE, count_near_ties, reference_generation
from services.cli import lora
from services.values.errors import NotFound
from services.wire.isthmus.v1 import generation_pb2

pytestmark = pytest.mark.asyncio(loop_scope="session")

ANSWER = 8


async def lora_command(cluster, *words, ranks=()):
    router = cluster.processes.router_endpoint()
    return await lora._run(lora.LoraConfig(words=words, ranks=ranks, router=router))


async def until_listed(cluster, *names):
    async with asyncio.timeout(10):
        while {m.id.partition(":")[2] for m in (await models(cluster)) if m.base} != {*names}:
            await asyncio.sleep(0.05)


async def models(cluster):
    return (await cluster.stub.ListModels(generation_pb2.ListModelsRequest())).models


async def test_adapters_are_exact_and_come_and_go_while_ranks_serve(cluster, capsys):
    """ "half" is loaded at the start, and "all" later."""
    base, name = cluster.model, cluster.model.name
    directories = {"half": cluster.adapter, "all": adapter_of(base, "all")}
    await until_listed(cluster, "half")
    assert await lora_command(cluster, "load", "all", directories["all"].name) == 0
    await until_listed(cluster, "half", "all")
    ids = random_ids(70, "adapters")

    async def answered(adapter):
        model = f"{name}:{adapter}" if adapter else name
        tokens, finish = await cluster.generate(ids, ANSWER, model=model)
        directory = merged(base, directories[adapter]) if adapter else base
        count_near_ties(reference_generation(directory, tuple(ids), ANSWER), tokens)
        return tokens, finish.usage.reused_tokens

    first = [await answered(adapter) for adapter in ("", "half", "all")]
    assert [reused for _, reused in first] == [0, 0, 0], "KV was read under another adapter"
    assert len({tuple(tokens) for tokens, _ in first}) == 3
    again = await asyncio.gather(*map(answered, ("", "half", "all")))
    assert [tokens for tokens, _ in again] == [tokens for tokens, _ in first]
    assert all(reused > 0 for _, reused in again)

    other = adapter_of(tiny_checkpoint("llama", num_kv_heads=1), "other")
    assert await lora_command(cluster, "load", "other", other.name, ranks=("decode/0",)) == 1
    assert "SGLang refuses adapter other" in capsys.readouterr().err
    running = asyncio.create_task(cluster.generate(ids, 200, model=f"{name}:all"))
    await asyncio.sleep(0.3)
    assert await lora_command(cluster, "unload", "all") == 0
    assert len((await running)[0]) == 200
    await until_listed(cluster, "half")
    with pytest.raises(NotFound):
        await cluster.generate(ids, 1, model=f"{name}:all")
    assert await lora_command(cluster, "load", "all", directories["all"].name) == 0
    await until_listed(cluster, "half", "all")
    tokens, reused = await answered("all")
    assert (tokens, reused > 0) == (first[2][0], True), "what was cached with its weights is found again"
    assert await lora_command(cluster, "unload", "all") == 0


# What SGLang does not serve of these is in tests/engine/sglang/service/test_adapters.py.
PEFT_KINDS = {
    "plain": dict(r=4, lora_alpha=8, target_modules="all-linear"),
    "usual": dict(r=8, lora_alpha=8, lora_dropout=0.1),  # PEFT's own choice: q_proj and v_proj
    "one_layer": dict(r=3, lora_alpha=2, target_modules=["q_proj", "v_proj"], layers_to_transform=[1]),
}


@pytest.fixture
def pefts():
    return pytest.importorskip("exactness.pefts", reason="PEFT is not installed here: make setup-sglang")


async def test_answers_are_pefts_own_beside_the_models(cluster, pefts):
    """All are asked at once, and go on from what each has cached."""
    base, name, root = cluster.model, cluster.model.name, cluster.adapter.parent
    for kind, config in PEFT_KINDS.items():
        pefts.saved(base, root / f"peft-{kind}", **config)
        assert await lora_command(cluster, "load", kind, f"peft-{kind}") == 0
    await until_listed(cluster, "half", *PEFT_KINDS)
    alone = pefts.plain_model(base)
    its = {kind: pefts.with_adapter(base, root / f"peft-{kind}") for kind in PEFT_KINDS} | {"": alone}

    async def answered(kind, ids):
        tokens, finish = await cluster.generate(ids, ANSWER, model=f"{name}:{kind}" if kind else name)
        return tokens, finish.usage.reused_tokens

    first = random_ids(70, "peft")
    answers = {kind: await answered(kind, first) for kind in its}
    assert [reused for _, reused in answers.values()] == [0] * len(its), "KV was read under another adapter"
    texts = {kind: [*first, *tokens, *random_ids(5, "more")] for kind, (tokens, _) in answers.items()}
    further = dict(
        zip(its, await asyncio.gather(*(answered(kind, texts[kind]) for kind in its)), strict=True)
    )
    for kind, model in its.items():
        for text, (tokens, _) in ((first, answers[kind]), (texts[kind], further[kind])):
            assert len(tokens) == ANSWER and pefts.gap_of(model, text, tokens) < NEAR_TIE, kind
        assert further[kind][1] >= 64, "its own text was not found again"
        assert not kind or pefts.gap_of(alone, first, answers[kind][0]) > NEAR_TIE, "it changes nothing"
    for kind in PEFT_KINDS:
        assert await lora_command(cluster, "unload", kind) == 0
