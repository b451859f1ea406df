"""The OpenAI-compatible API of a real router over a real socket: what clients send, see and cannot break."""

import asyncio
import json
from dataclasses import replace

import grpc
import httpx
import pytest

from cluster.harness import BLOCK, FakeCluster
from services.cli import generate
from services.cli.look import explain
from services.cli.router_client import RanksConfig, ask_for_ranks
from services.engine.fake import continuation
from services.router.ranks.balance import Balance, Liveness
from services.router.text.rendered_chat import render_chat
from services.router.text.tokenizer import Tokenizer
from services.values.errors import Unauthenticated
from services.wire.isthmus.v1.generation_pb2 import Chat, ChatMessage

HI = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello, who are you?"}]
EOS_ID = 1


def http_of(cluster, router=0):
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{cluster.routers[router].http_port}", timeout=20)


def chat_ids(tokenizer, messages):
    return render_chat(tokenizer, Chat(messages=[ChatMessage(**message) for message in messages])).ids


async def answer_of(http, path, **body):
    response = await http.post(path, json={"max_tokens": 8, "ignore_eos": True, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def events_of(http, path, **body):
    """The chunks of a stream; it must end with [DONE]."""
    body = {"max_tokens": 8, "ignore_eos": True, "stream": True, **body}
    async with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return Tokenizer(str(model_dir))


async def test_what_one_says_and_how_it_ends(etcd_endpoint, model_dir, cluster_name, tokenizer, subtests):
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name) as cluster, http_of(cluster) as http:
        with subtests.test("whole answers and streams say the same"):
            (model,) = (await http.get("/v1/models")).json()["data"]
            context = cluster.ranks["decode-0/0"].engine.max_context_tokens
            assert (model["id"], model["max_model_len"]) == ("fake", context)
            assert (await http.get("/health")).status_code == 200

            prompt_ids = chat_ids(tokenizer, HI)
            output_ids = continuation(prompt_ids, 8)
            usage = {
                "prompt_tokens": len(prompt_ids),
                "completion_tokens": 8,
                "total_tokens": len(prompt_ids) + 8,
                "completion_tokens_details": {"reasoning_tokens": 0},
            }

            whole = await answer_of(http, "/v1/chat/completions", messages=HI, return_token_ids=True)
            assert whole["choices"][0]["message"]["content"] == tokenizer.decode(output_ids)
            assert whole["choices"][0]["token_ids"] == output_ids
            assert whole["prompt_token_ids"] == prompt_ids
            assert whole["choices"][0]["finish_reason"] == "length"
            assert whole["usage"] == {**usage, "prompt_tokens_details": {"cached_tokens": 0}}
            assert (whole["model"], whole["isthmus"]["plan"]) == ("fake", "remote")

            chunks = await events_of(
                http, "/v1/chat/completions", messages=HI, stream_options={"include_usage": True}
            )
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
            assert deltas[0]["role"] == "assistant"
            assert "".join(delta.get("content", "") for delta in deltas) == tokenizer.decode(output_ids)
            assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [
                *[None] * (len(chunks) - 2),
                "length",
            ]
            assert all(chunk["usage"] is None for chunk in chunks[:-1])
            reused = chunks[-2]["isthmus"]["prefill_prefix_len"]
            assert reused > 0  # of the first request
            assert chunks[-1]["choices"] == []
            assert chunks[-1]["usage"] == {**usage, "prompt_tokens_details": {"cached_tokens": reused}}
            assert len({chunk["id"] for chunk in chunks}) == 1
            await cluster.assert_nothing_held()
        with subtests.test("an answer goes on where the last message ends"):
            whole = await answer_of(http, CHAT, messages=HI, max_tokens=24, return_token_ids=True)
            ids = whole["choices"][0]["token_ids"]
            # Its ids are those of its text: a token of this model is a character.
            begun = {"role": "assistant", "content": tokenizer.decode(ids[:9])}
            body = {"messages": [*HI, begun], "continue_final_message": True, "add_generation_prompt": False}
            for more in ({}, {"messages": [*HI, {**begun, "token_ids": ids[:9]}]}):
                rest = await answer_of(http, CHAT, **{**body, **more}, max_tokens=15, return_token_ids=True)
                (choice,) = rest["choices"]
                assert choice["token_ids"] == ids[9:24]
                assert choice["message"]["content"] == tokenizer.decode(ids[9:24])
                assert rest["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            told = await http.post("/tokenize", json=body)
            assert told.json()["tokens"] == [*chat_ids(tokenizer, HI), *ids[:9]]

            prefilled = {"messages": [*HI, begun], "max_tokens": 15, "ignore_eos": True}
            (block,) = (await http.post("/v1/messages", json=prefilled)).json()["content"]
            assert block["text"] == tokenizer.decode(ids[9:24])
            refused = await http.post(CHAT, json={"messages": HI, "continue_final_message": True})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "continue_final_message")
            await cluster.assert_nothing_held()
        with subtests.test("completions take text and ids"):
            text = "Once upon a time there was a page"
            prompt_ids = tokenizer.encode(text)
            output_ids = continuation(prompt_ids, 8)
            for prompt in (text, prompt_ids):
                whole = await answer_of(
                    http, "/v1/completions", prompt=prompt, return_token_ids=True, logprobs=0
                )
                (choice,) = whole["choices"]
                assert choice["text"] == tokenizer.decode(output_ids)
                assert choice["token_ids"] == output_ids
                assert choice["logprobs"]["tokens"] == [tokenizer.token_text(token) for token in output_ids]
                chunks = await events_of(http, "/v1/completions", prompt=prompt)
                assert "".join(c["choices"][0]["text"] for c in chunks) == tokenizer.decode(output_ids)
                assert "usage" not in chunks[-1]
            answers = await asyncio.gather(
                *(answer_of(http, "/v1/completions", prompt=prompt_ids[: 5 + i]) for i in range(8))
            )
            for i, whole in enumerate(answers):
                expected = continuation(prompt_ids[: 5 + i], 8)
                assert whole["choices"][0]["text"] == tokenizer.decode(expected)
            await cluster.assert_nothing_held()
        with subtests.test("what ends an answer"):
            prompt = tokenizer.encode("How does it end?")
            text = tokenizer.decode(continuation(prompt, 40))
            stop = text[17:20]
            begin = text.index(stop)
            body = {"prompt": prompt, "max_tokens": 40, "stop": ["never to be seen", stop]}
            whole = await answer_of(http, "/v1/completions", **body)
            assert whole["choices"][0]["text"] == text[:begin]
            assert whole["choices"][0]["finish_reason"] == "stop"
            assert whole["isthmus"]["matched_stop"] == stop
            assert whole["usage"]["completion_tokens"] < 40
            chunks = await events_of(http, "/v1/completions", **body)
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text[:begin]

            shown = {**body, "include_stop_str_in_output": True, "logprobs": 0, "return_token_ids": True}
            (choice,) = (await answer_of(http, "/v1/completions", **shown))["choices"]
            assert choice["text"] == text[: begin + len(stop)] == tokenizer.decode(choice["token_ids"])
            assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])
            pieces = [chunk["choices"][0] for chunk in await events_of(http, "/v1/completions", **shown)]
            assert "".join(piece["text"] for piece in pieces) == choice["text"]
            offsets = [offset for piece in pieces for offset in piece["logprobs"]["text_offset"]]
            assert offsets == choice["logprobs"]["text_offset"] == list(range(begin + len(stop)))

            prompt, output, eos_at = prompt_that_meets_eos()
            before = output[:eos_at]
            for ignore_eos, reason, ids in ((False, "stop", [*before, EOS_ID]), (True, "length", output)):
                whole = await answer_of(
                    http, "/v1/completions", prompt=prompt, ignore_eos=ignore_eos, return_token_ids=True
                )
                (choice,) = whole["choices"]
                assert (choice["finish_reason"], choice["token_ids"]) == (reason, ids)
                assert choice["text"] == tokenizer.decode(ids)  # which is silent about the end of sequence
                assert whole["isthmus"]["matched_stop"] == (
                    None if ignore_eos else tokenizer.token_text(EOS_ID)
                )
            whole = await answer_of(
                http, "/v1/completions", prompt=prompt, stop_token_ids=[output[0]], return_token_ids=True
            )
            assert whole["choices"][0]["token_ids"] == output[:1]
            assert (whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]) == ("", "stop")
            for stop_id, said in (
                (output[0], tokenizer.decode(output[:1])),
                (EOS_ID, tokenizer.decode(before)),
            ):
                shown = {"prompt": prompt, "stop_token_ids": [stop_id], "include_stop_str_in_output": True}
                whole = await answer_of(http, "/v1/completions", **shown)
                assert (whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]) == (said, "stop")
            await cluster.assert_nothing_held()


async def test_a_conversation_stays_on_its_rank_and_moves_its_delta(
    etcd_endpoint, model_dir, cluster_name, tokenizer
):
    async with (
        FakeCluster(etcd_endpoint, model_dir, cluster_name, decode=(2, 2)) as cluster,
        http_of(cluster) as http,
    ):
        talks = {name: [{"role": "user", "content": f"{name}, tell me about pages"}] for name in "abcd"}
        homes, lengths = {}, {}
        for turn in range(3):
            for name, messages in talks.items():
                headers = {
                    "x-isthmus-conversation": name,
                    "x-isthmus-tenant": name,  # or the words they all begin with would bring them together
                    "x-request-id": f"{name}{turn}",
                }
                body = {"messages": messages, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
                answer = (await http.post("/v1/chat/completions", json=body, headers=headers)).json()
                assert answer["id"] == f"chatcmpl-{name}{turn}"
                choice, placed, usage = answer["choices"][0], answer["isthmus"], answer["usage"]
                assert choice["token_ids"] == continuation(chat_ids(tokenizer, messages), 8)
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                assert usage["prompt_tokens"] == cached + placed["computed_tokens"]
                assert usage["prompt_tokens"] == placed["decode_prefix_len"] + placed["delta_tokens"]
                assert cached == placed["prefill_prefix_len"]
                if turn:
                    assert (placed["decode_rank"], placed["reason"]) == (homes[name], "pinned")
                    assert placed["decode_prefix_len"] >= lengths[name] - 2 * BLOCK
                    assert placed["drift_tokens"] == 0
                    assert cached > 0
                homes[name] = placed["decode_rank"]
                lengths[name] = usage["total_tokens"]
                talks[name] = [
                    *messages,
                    {"role": "assistant", "token_ids": choice["token_ids"]},
                    {"role": "user", "content": f"more {turn}"},
                ]
        # Another tenant's first turn finds nothing of it.
        headers = {"x-isthmus-tenant": "other"}
        body = {"messages": talks["a"], "max_tokens": 1}
        answer = (await http.post("/v1/chat/completions", json=body, headers=headers)).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        await cluster.assert_nothing_held()


def prompt_that_meets_eos(limit=8):
    """A prompt whose continuation holds the end of sequence, and where: not first, not last."""
    for number in range(10_000):
        prompt = [5, number % 512, number // 512]
        output = continuation(prompt, limit)
        if EOS_ID in output[1:-1]:
            return prompt, output, output.index(EOS_ID)
    raise AssertionError("no such prompt")


CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TOO_LONG = {
    "too many tokens": (COMPLETION, {"prompt": [1] * 5000}, "prompt"),
    "too much text": (COMPLETION, {"prompt": "a" * 5000}, "prompt"),
    "far too much text": (COMPLETION, {"prompt": "a" * (2 << 20)}, "prompt"),
    "too long a chat": (CHAT, {"messages": [{"role": "user", "content": "a" * 5000}]}, "messages"),
    "too many messages": (CHAT, {"messages": HI * 3000}, "messages"),
}
BAD = {
    "unknown model": (COMPLETION, {"model": "gpt-9", "prompt": "a"}, 404, None),
    "unknown role": (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages[0].role"),
    "no messages": (CHAT, {}, 400, "messages"),
    "no prompt": (COMPLETION, {}, 400, "prompt"),
    "empty prompt": (COMPLETION, {"prompt": ""}, 400, "prompt"),
    "not JSON": (CHAT, b'{"messages": [', 400, None),
    "not an object": (CHAT, b"[]", 400, None),
    "too large a body": (COMPLETION, {"prompt": "a" * (9 << 20)}, 413, None),
    "id out of range": (COMPLETION, {"prompt": [1, 512]}, 400, "prompt"),
    "temperature": (COMPLETION, {"prompt": "a", "temperature": -1}, 400, "temperature"),
    "max_tokens": (COMPLETION, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    "unknown path": ("/v1/embeddings", {"input": "a"}, 404, None),
}


async def test_bad_input_and_no_rank(etcd_endpoint, model_dir, cluster_name, subtests):
    async with (
        FakeCluster(etcd_endpoint, model_dir, cluster_name, decode=(1,)) as cluster,
        http_of(cluster) as http,
    ):
        with subtests.test("bad input is named and costs nothing"):
            context = cluster.ranks["decode-0/0"].engine.max_context_tokens
            for name, (path, body, status, param) in BAD.items():
                streams = [{}] if isinstance(body, bytes) else [{}, {"stream": True}]
                for stream in streams:
                    content = body if isinstance(body, bytes) else json.dumps({**body, **stream})
                    answer = await http.post(path, content=content)
                    assert answer.status_code == status, (name, answer.text)
                    error = answer.json()["error"]
                    assert error["code"] == status and error["type"] == "invalid_request_error", (name, error)
                    assert error["message"], name
                    assert error["param"] == param, (name, error)
            for name, (path, body, param) in TOO_LONG.items():
                answer = await http.post(path, json=body)
                assert answer.status_code == 400, (name, answer.text)
                error = answer.json()["error"]
                assert (error["code"], error["param"]) == ("context_length_exceeded", param), (name, error)
                assert f"This model's maximum context length is {context} tokens" in error["message"], name
            odd = {"x-isthmus-conversation": "y" * 200}
            answer = await http.post(COMPLETION, json={"prompt": "a", "max_tokens": 1}, headers=odd)
            assert answer.status_code == 400 and "conversation_id" in answer.json()["error"]["message"]
            assert (await http.get(COMPLETION)).status_code == 405
            assert (await answer_of(http, COMPLETION, prompt=[1, 2, 3]))["usage"]["prompt_tokens"] == 3
            await cluster.assert_nothing_held()
        with subtests.test("without a rank it says so"):
            await cluster.stop_rank("decode-0/0")
            for stream in (False, True):
                answer = await http.post(COMPLETION, json={"prompt": "a", "stream": stream})
                assert answer.status_code == 503
                assert answer.json()["error"]["type"] == "unavailable_error"


async def until_idle(cluster):
    async with asyncio.timeout(10):
        while cluster.routers[0].generator.num_running:
            await asyncio.sleep(0.01)
    await cluster.assert_nothing_held()


async def test_a_client_that_leaves_frees_everything(etcd_endpoint, model_dir, cluster_name):
    # Left alone, an answer would take 30 s: three times as long as anything here waits.
    cluster = FakeCluster(etcd_endpoint, model_dir, cluster_name, fake_step_s=0.02)
    body = {"prompt": [9] * 30, "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
    async with cluster, http_of(cluster) as http:
        generator = cluster.routers[0].generator
        # In the middle of a stream.
        async with http.stream("POST", COMPLETION, json={**body, "stream": True}) as response:
            async for line in response.aiter_lines():
                if line:
                    break
            assert generator.num_running == 1
        await until_idle(cluster)
        # While it waits for a whole answer; a second request of the same id is one of its own.
        headers = {"x-request-id": "mine"}
        waiting = asyncio.create_task(http.post(COMPLETION, json=body, headers=headers))
        async with asyncio.timeout(10):
            while not generator.num_running:
                await asyncio.sleep(0.01)
        short = {**body, "max_tokens": 1}
        second = await http.post(COMPLETION, json=short, headers=headers)
        assert second.status_code == 200
        assert second.headers["x-request-id"].startswith("mine-")
        assert second.json()["id"] == f"cmpl-{second.headers['x-request-id']}"
        # Over gRPC it is told so.
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await cluster.generate([1, 2, 3], request_id="mine")
        assert refusal.value.code() is grpc.StatusCode.ALREADY_EXISTS
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await until_idle(cluster)
        # Eight at once, cut off at whatever they are doing.
        calls = [
            asyncio.create_task(http.post(COMPLETION, json={**body, "prompt": [i] * 99})) for i in range(8)
        ]
        await asyncio.wait(calls, timeout=0.15)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await until_idle(cluster)


async def test_a_router_with_keys_and_one_that_stops(
    etcd_endpoint, model_dir, cluster_name, tmp_path, subtests
):
    with subtests.test("a router with keys serves who shows one"):
        (file := tmp_path / "keys").write_text("key-1\nkey-2\n")
        async with FakeCluster(etcd_endpoint, model_dir, cluster_name, decode=(1,)) as cluster:
            cluster.router_config = replace(cluster.router_config, api_key_file=file, allowed_origins=("*",))
            await cluster._start_router("router-keys")
            async with http_of(cluster, 1) as http:
                assert (await http.get("/v1/models")).status_code == 401
                http.headers["authorization"] = "Bearer key-2"
                async with asyncio.timeout(10):
                    while (await http.get("/health")).status_code != 200:  # it has found the ranks
                        await asyncio.sleep(0.02)
                answer = await http.post(COMPLETION, json={"prompt": "a"}, headers={"origin": "http://page"})
                assert answer.status_code == 200
                assert "isthmus_requests_received_total{" in (await http.get("/metrics")).text
                assert answer.headers["access-control-allow-origin"] == "*"
            router = f"127.0.0.1:{cluster.routers[1].server.port}"
            for command, config in (
                (lambda config: generate._generate(config, "Hello"), generate.GenerateConfig),
                (lambda config: explain._explain(config, "Hello"), explain.ExplainConfig),
                (ask_for_ranks, RanksConfig),
            ):
                await command(config(router=router, api_key_file=file))
                with pytest.raises(Unauthenticated):
                    await command(config(router=router))
    with subtests.test("a router that stops does not wait for idle connections"):
        cluster = FakeCluster(etcd_endpoint, model_dir, f"{cluster_name}-1", decode=(1,))
        cluster.router_config = replace(cluster.router_config, grace_s=1000.0, http_keep_alive_s=1000)
        async with cluster, http_of(cluster) as http:
            assert (await http.get("/v1/models")).status_code == 200
            front = cluster.routers[0].http
            assert front._server.config.timeout_keep_alive == 1000
            assert front._server.server_state.connections  # the client keeps it, and so do we
            async with asyncio.timeout(60):
                await front.stop()


async def test_health_says_whether_a_request_could_be_taken(
    etcd_endpoint, model_dir, cluster_name, monkeypatch, subtests
):
    for plans, usable_without in (
        (("remote",), ()),
        (("remote", "local"), ("prefill",)),  # decode computes prompts itself
    ):
        name = f"{cluster_name}-{len(plans)}"
        cluster = FakeCluster(etcd_endpoint, model_dir, name, decode=(1,), plans=plans)
        async with cluster, http_of(cluster) as http:
            assert (await http.get("/health")).status_code == 200
            for lost in ("decode", "prefill"):
                with subtests.test(plans=plans, lost=lost), monkeypatch.context() as patch:
                    is_lost = {f"{lost}-0": Liveness.SILENT}.get
                    patch.setattr(
                        Balance, "liveness", lambda _, rank, it=is_lost: it(rank.worker, Liveness.LIVE)
                    )
                    answer = await http.get("/health")
                    assert answer.status_code == (200 if lost in usable_without else 503)
                    if lost not in usable_without:
                        assert f"no {lost} rank" in answer.json()["error"]["message"]
