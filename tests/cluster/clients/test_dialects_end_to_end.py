"""Each HTTP API of a real router over a real socket: one generation, in the words of several."""

import json

import httpx
import pytest

from cluster.harness import BLOCK, FakeCluster
from services.engine.fake import continuation
from services.router.text.rendered_chat import render_chat
from services.router.text.tokenizer import Tokenizer
from services.wire.isthmus.v1 import generation_pb2
from services.wire.isthmus.v1.generation_pb2 import Chat, ChatMessage

HI = "Hello, who are you? I should like to hear of pages."
AGAIN = "And what of blocks?"


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return Tokenizer(str(model_dir))


def http_of(cluster):
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{cluster.routers[0].http_port}", timeout=20)


async def post(http, path, **body):
    answer = await http.post(path, json={"ignore_eos": True, **body})
    assert answer.status_code == 200, answer.text
    return answer


def last_event(answer):
    data = answer.text.strip().split("\n\n")[-1].split("data: ")[1]
    return json.loads(data)


async def test_every_api_says_what_was_generated_and_goes_on_there(
    etcd_endpoint, model_dir, cluster_name, tokenizer, subtests
):
    with subtests.test("every api says what was generated"):
        chat = Chat(
            messages=[ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content=HI)]
        )
        prompt_ids = list(render_chat(tokenizer, chat).ids)
        said = tokenizer.decode(continuation(prompt_ids, 8))
        messages = [{"role": "user", "content": HI}]
        async with FakeCluster(etcd_endpoint, model_dir, cluster_name) as cluster, http_of(cluster) as http:
            asked = {"messages": messages, "system": "Be brief.", "max_tokens": 8}
            message = (await post(http, "/v1/messages", **asked)).json()
            assert message["content"] == [{"type": "text", "text": said}]
            assert message["usage"]["input_tokens"] == len(prompt_ids)
            counted = (await post(http, "/v1/messages/count_tokens", **asked)).json()
            assert counted == {"input_tokens": len(prompt_ids)}
            deltas = [
                json.loads(line.removeprefix("data: "))["delta"]["text"]
                for line in (await post(http, "/v1/messages", **asked, stream=True)).text.splitlines()
                if '"text_delta"' in line
            ]
            assert "".join(deltas) == said

            asked = {"input": HI, "instructions": "Be brief.", "max_output_tokens": 8}
            response = (await post(http, "/v1/responses", **asked)).json()
            assert response["output"][0]["content"][0]["text"] == said
            assert response["usage"]["input_tokens"] == len(prompt_ids)
            streamed = last_event(await post(http, "/v1/responses", **asked, stream=True))["response"]
            assert streamed["output"][0]["content"][0]["text"] == said

            asked = {"input_ids": prompt_ids, "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
            generated = (await post(http, "/generate", **asked)).json()
            assert (generated["text"], generated["output_ids"]) == (said, continuation(prompt_ids, 8))

            everything = [{"role": "system", "content": "Be brief."}, *messages]
            told = (await post(http, "/tokenize", messages=everything)).json()
            assert (told["tokens"], told["count"]) == (prompt_ids, len(prompt_ids))
            text = (await post(http, "/detokenize", tokens=prompt_ids)).json()["text"]
            assert text == tokenizer.text_of(prompt_ids)
            over_grpc = await cluster.stubs[0].Tokenize(
                generation_pb2.TokenizeRequest(request=generation_pb2.GenerateRequest(chat=chat))
            )
            assert list(over_grpc.token_ids) == prompt_ids
            request = generation_pb2.DetokenizeRequest(token_ids=prompt_ids)
            assert (await cluster.stubs[0].Detokenize(request)).text == text
            await cluster.assert_nothing_held()
    with subtests.test("a response goes on where the one before ended"):
        # Its ids, not its text encoded again: the decode rank holds all of them, but for a part of a page.
        async with (
            FakeCluster(etcd_endpoint, model_dir, f"{cluster_name}-1") as cluster,
            http_of(cluster) as http,
        ):
            before = (await post(http, "/v1/responses", input=HI, max_output_tokens=24)).json()
            for drift_tokens in (None, 0):  # the second is the first that has a conversation
                asked = {"input": AGAIN, "max_output_tokens": 24, "previous_response_id": before["id"]}
                after = (await post(http, "/v1/responses", **asked)).json()
                whole = before["usage"]["total_tokens"]
                assert after["usage"]["input_tokens"] > whole
                assert after["isthmus"]["decode_prefix_len"] > whole - 2 * BLOCK
                assert after["isthmus"]["drift_tokens"] == drift_tokens
                before = after
            await cluster.assert_nothing_held()
