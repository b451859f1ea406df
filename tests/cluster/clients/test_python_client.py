"""The Python client against real routers and ranks: conversations hit, tools are called, formats are kept."""

import asyncio
import json
from contextlib import aclosing

import pytest

from cluster.harness import FakeCluster
from isthmus import AsyncClient, Cancelled, Client, IncompleteAnswer, InvalidRequest
from services.cli.model.make_model import make_model

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}}, "required": ["age"]}
WORDS = "[a-z]{24}"  # the fake engine has more ids than the tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("client") / "model"
    make_model(directory, tokenizer="bytes", chat_template="tools")
    return directory


@pytest.fixture
def fake_cluster(etcd_endpoint, cluster_name, model):
    return FakeCluster(etcd_endpoint, model, cluster_name, engine="fake", model=str(model))


async def test_both_clients(fake_cluster, subtests):
    async with fake_cluster as cluster:
        with subtests.test("the blocking client"):
            with Client(f"127.0.0.1:{cluster.routers[0].server.port}", timeout=60) as client:
                await asyncio.to_thread(a_chat, client)
                await asyncio.to_thread(tools, client)
                await asyncio.to_thread(formats, client)
                await asyncio.to_thread(operators, client)
            await cluster.assert_nothing_held()
        with subtests.test("the asynchronous client"):
            async with AsyncClient(f"127.0.0.1:{cluster.routers[0].server.port}", timeout=60) as client:
                await asyncio.gather(*(an_async_chat(client) for _ in range(2)))
                await an_async_tool(client)
                await aborted(client)
                await watched(client)
            await cluster.assert_nothing_held()


def a_chat(client):
    conversation = client.conversation("Be brief. " * 8, regex=WORDS, temperature=0)
    first = conversation.say("Hello")
    assert first.usage.decode_prefix_len == 0 and len(first.text) == 24
    with conversation.stream("And then?") as stream:
        texts = "".join(piece.text for piece in stream)
    second = stream.answer
    assert second.text == texts and second.usage.drift_tokens == 0
    assert second.placement.decode == first.placement.decode
    # All but the last token of what was there has KV, in pages of four.
    assert second.usage.decode_prefix_len >= first.usage.prompt_tokens + len(first.token_ids) - 5
    assert second.usage.prompt_tokens == second.usage.decode_prefix_len + second.usage.delta_tokens
    assert second.stages.first_token_s > 0
    told = client.explain(messages=conversation.messages)
    assert told.past_answers == {"given": 2} and told.chosen is not None


def tools(client):
    def weather(city: str, days: int = 1) -> str:
        """Return how warm it is."""
        return f"21 in {city}"

    conversation = client.conversation(tools=[weather], tool_choice="required", parallel_tool_calls=False)
    answer = conversation.say("Is it warm?", seed=3, max_tokens=2000)
    assert answer.finish_reason == "tool_calls" and answer.tool_calls[0].name == "weather"
    assert {"city"} <= set(answer.tool_calls[0].arguments) <= {"city", "days"}
    with pytest.raises(InvalidRequest):
        conversation.tool_result("no such call", "21")
    conversation.tool_result(answer.tool_calls[0], 21)
    again = conversation.say(max_tokens=2000, seed=4)
    assert again.finish_reason == "tool_calls" and again.usage.decode_prefix_len > 0

    seen = []
    with pytest.raises(IncompleteAnswer, match="still calls tools after 2 turns"):
        talk = client.conversation(
            tools=[weather], tool_choice="required", parallel_tool_calls=False, max_tokens=2000, seed=5
        )
        talk.run("Is it warm?", most_turns=2, called=lambda call, result: seen.append(result))
    assert len(seen) >= 2 and all(result.startswith("21 in ") for result in seen)


def formats(client):
    answer = client.generate("A city:", json_schema=SCHEMA, max_tokens=200, seed=1)
    assert answer.parsed == json.loads(answer.text) and answer.parsed["age"] <= 99
    assert client.generate("Yes?", choice=["yes", "no"], max_tokens=20).text in ("yes", "no")
    cut = client.generate("A city:", json_schema=SCHEMA, max_tokens=3)
    with pytest.raises(IncompleteAnswer, match="length"):
        _ = cut.parsed
    three = client.answers("Hello", n=3, max_tokens=4, seed=1)
    assert [(answer.index, len(answer.token_ids)) for answer in three] == [(0, 4), (1, 4), (2, 4)]
    best = client.generate("Hello", best_of=3, max_tokens=4, seed=1)
    assert len(best.token_ids) == 4 and best.left_out.completion_tokens == 8
    assert client.generate("Hello", max_tokens=2, logprobs=0).logprobs[1].chosen.logprob <= 0
    with pytest.raises(InvalidRequest, match="temperature"):
        client.generate("Hello", temperature=-1)


def operators(client):
    (model,) = client.models()
    ranks = client.ranks().ranks
    assert (model.prefill_ranks, model.decode_ranks) == (1, 2)
    assert sorted((each.role, each.state) for each in ranks) == [
        ("decode", "live"),
        ("decode", "live"),
        ("prefill", "live"),
    ]
    prompt = client.tokenize("Hello", add_special_tokens=False)
    assert client.detokenize(prompt.token_ids) == "Hello"
    assert prompt.max_context_tokens == model.max_context_tokens
    assert not client.abort("nobody's")
    client.generate("Hello", max_tokens=2, request_id="seen")
    news = client.watch(interval_s=0.1)
    assert len(next(news).ranks) == 3
    client.generate("Hello", max_tokens=2, request_id="watched")
    finished = next(each for told in news for each in told.finished)
    assert (finished.request_id, finished.outcome) == ("watched", "ok")
    assert finished.finish.reason == "length" and any(candidate.chosen for candidate in finished.candidates)
    news.close()


async def an_async_chat(client):
    conversation = client.conversation(regex=WORDS, temperature=0)
    first = await conversation.say("Hello")
    stream = conversation.stream("And then?")
    texts = "".join([text async for text in stream.texts()])
    assert texts == stream.answer.text
    assert stream.answer.usage.decode_prefix_len >= first.usage.prompt_tokens


async def an_async_tool(client):
    async def weather(city: str) -> dict:
        return {"city": city}

    conversation = client.conversation(tools=[weather], tool_choice="required", max_tokens=2000, seed=5)
    seen = []
    with pytest.raises(IncompleteAnswer):
        await conversation.run("Warm?", most_turns=1, called=lambda call, result: seen.append((call, result)))
    assert seen and all(json.loads(result) == call.arguments for call, result in seen)


async def aborted(client):
    stream = client.stream("Hello", max_tokens=3000, ignore_eos=True)
    async for _ in stream:
        await client.abort(stream.request_id)
    assert stream.answer.finish_reason == "aborted"


async def watched(client):
    async with aclosing(client.watch(interval_s=0.1)) as news:
        assert len((await anext(news)).ranks) == 3
        waiting = asyncio.create_task(anext(news))
        await client.close()
        with pytest.raises(Cancelled):
            while True:
                await waiting
                waiting = asyncio.create_task(anext(news))
