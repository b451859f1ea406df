"""A tool loop over each HTTP API, as its clients play it, keeps its prefix on the decode rank."""

import httpx
import pytest

from cluster.harness import BLOCK, FakeCluster
from cluster.metrics_page import samples, value
from cluster.tool_loops import Script
from router.templates.agents import answers
from router.templates.formats import FORMATS
from services.router.text.tokenizer import Tokenizer

SCHEMA = {"type": "object", "properties": {"what": {"type": "string"}}}
QUESTION = {"role": "user", "content": "What is it?"}


class Chat:
    """A client that knows nothing of thinking."""

    path = "/v1/chat/completions"

    def __init__(self):
        self.messages = [QUESTION]

    def body(self):
        function = {"name": "look_up", "parameters": SCHEMA}
        return {"messages": self.messages, "tools": [{"type": "function", "function": function}]}

    def take(self, answer):
        message = answer["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        sent = {"role": "assistant", "content": message["content"]} | ({"tool_calls": calls} if calls else {})
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in calls]
        self.messages += [sent, *results]
        return answer["usage"]["prompt_tokens"]


class Messages:
    """As Claude Code: its first line is another one each time."""

    path = "/v1/messages"

    def __init__(self):
        self.messages, self.number = [QUESTION], 0

    def body(self):
        self.number += 1
        billing = {"type": "text", "text": f"x-anthropic-billing-header: cch={self.number:05};"}
        return {
            "max_tokens": 1000,
            "system": [billing, {"type": "text", "text": "Be brief"}],
            "messages": self.messages,
            "tools": [{"name": "look_up", "input_schema": SCHEMA}],
        }

    def take(self, answer):
        content = answer["content"]
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "ok"}
            for block in content
            if block["type"] == "tool_use"
        ]
        self.messages += [{"role": "assistant", "content": content}, {"role": "user", "content": results}]
        return answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"]


class Responses:
    """As Codex: all items each time."""

    path = "/v1/responses"

    def __init__(self):
        self.items = [QUESTION]

    def body(self):
        tool = {"type": "function", "name": "look_up", "parameters": SCHEMA}
        return {"input": self.items, "store": False, "tools": [tool]}

    def take(self, answer):
        calls = [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]
        outputs = [{"type": "function_call_output", "call_id": call, "output": "ok"} for call in calls]
        self.items += [*answer["output"], *outputs]
        return answer["usage"]["input_tokens"]


@pytest.mark.long
async def test_a_loop_keeps_its_prefix(etcd_endpoint, tmp_path, cluster_name, monkeypatch, subtests):
    for number, client_type in enumerate([Chat, Messages, Responses]):
        with subtests.test(client_type=client_type):
            format_, script, client, held, had = FORMATS["qwen3"], Script(), client_type(), 0, 0
            script.install(monkeypatch.setattr)
            tokenizer = Tokenizer(str(format_.save(tmp_path)))
            cluster = FakeCluster(
                etcd_endpoint, tmp_path, f"{cluster_name}-{number}", decode=(1,), kv_pages=8192
            )
            async with cluster, httpx.AsyncClient(timeout=30) as http:
                base = f"http://127.0.0.1:{cluster.routers[0].http_port}"
                for said in answers(format_, 3):
                    ids = tokenizer.encode(format_.written(said))
                    script.says(ids)
                    answer = await http.post(
                        base + client.path, json=client.body() | {"temperature": 0, "model": ""}
                    )
                    assert answer.status_code == 200, answer.text
                    prompt_tokens = client.take(answer.json())
                    found = await samples(cluster.routers[0], cluster)
                    delivered = value(found, "isthmus_delivered_hit_tokens_total", role="decode")
                    assert held - BLOCK < delivered - had <= held or not held
                    held, had = prompt_tokens + len(ids) - 1, delivered
