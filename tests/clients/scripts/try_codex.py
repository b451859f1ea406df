"""Codex' CLI 0.169, by the shapes of its requests: stream, nothing stored, the whole history each time, a key
of its session, two developer messages, and tools of kinds that a model server does not have."""

import json
import urllib.request

from checks import BASE, MODEL, QUESTION, run

SESSION = "0199d4d2-6f2c-7b11-9e53-3a1f6a3c2b10"
SHELL = {
    "type": "function",
    "name": "shell",
    "description": "Runs a shell command and returns its output.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}},
            "workdir": {"type": "string"},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
}
OTHERS = [{"type": "namespace", "name": "multi_agent", "tools": [SHELL]}, {"type": "web_search"}]


def message(role, text):
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def ask(items):
    """The events of a turn, in order."""
    body = {
        "model": MODEL,
        "instructions": "You are a coding agent.",
        "input": items,
        "tools": [SHELL, *OTHERS],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": SESSION,
        "max_output_tokens": 24,  # not Codex': a model of no meaning would go on for ever
    }
    headers = {
        "content-type": "application/json",
        "accept": "text/event-stream",
        "authorization": "Bearer none",
    }
    headers |= {"session-id": SESSION, "thread-id": SESSION, "originator": "codex_exec"}
    request = urllib.request.Request(f"{BASE}/v1/responses", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.read().decode().splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    names = [line[7:] for line in lines if line.startswith("event: ")]
    assert names == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


BEGIN = [
    message("developer", "<permissions instructions> Approvals: never. </permissions instructions>"),
    message("developer", "<environment_context> cwd: /repo </environment_context>"),
    message("user", QUESTION),
]
CALL = {
    "type": "function_call",
    "name": "shell",
    "arguments": '{"command":["ls"]}',
    "call_id": "call_recorded",
}
RESULT = {"type": "function_call_output", "call_id": "call_recorded", "output": '{"output":"README.md\\n"}'}


def first_turn():
    check(ask(BEGIN))


def after_a_tool():
    """Its whole history again, with a call and what came of it."""
    check(ask([*BEGIN, CALL, RESULT]))


def second_turn_finds_the_first():
    """By the items as they came: a turn is one conversation with the one before."""
    first = check(ask(BEGIN))
    second = check(ask([*BEGIN, *first["output"], message("user", "And now?")]))
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > 0


def check(events):
    """It needs the first event, each item when it is done, and the last event with its usage."""
    assert events[0]["type"] == "response.created"
    last = events[-1]
    assert last["type"] in ("response.completed", "response.incomplete"), last
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last["response"]["output"]
    assert last["response"]["usage"]["total_tokens"] > 0
    return last["response"]


run(first_turn, after_a_tool, second_turn_finds_the_first)
