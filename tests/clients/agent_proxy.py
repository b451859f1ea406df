"""Between an unmodified agent and a router: makes a model of no meaning call the agent's own tools.

    agent -- its own request --> proxy -- the same, but the answer has to be what the script says --> router
          <-- the router's own bytes --

The agent meets the router's answers, ids, streams and usage as they are. What a turn has to be is asked for
in words that any client may use: a named tool whose parameters are constants, or a pattern for the text.
"""

import json
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

# Of each agent's tools the one that runs a command, with arguments that are the same to every agent's taste.
_COMMAND = "echo isthmus"
_SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # by which mini-swe-agent ends
SHELLS: dict[str, dict[str, Any]] = {
    "exec_command": {"cmd": _COMMAND},
    "shell_command": {"command": _COMMAND},
    "shell": {"command": ["echo", "isthmus"]},
    "run_shell_command": {"command": _COMMAND, "is_background": False},
    "bash": {"command": _COMMAND, "description": "says a word"},
}
CALL, PARALLEL, ANSWER, SUBMIT, ASIDE = "call", "parallel", "answer", "submit", "aside"
_SAID = "All is done."
_MOST_TOKENS = 256
_SEEDS = 40


@dataclass(slots=True)
class Turn:
    """One request of the agent's, and what its answer took. An aside is a request that offers other tools
    than the first one that offers a shell: for a title, or by a subagent."""

    kind: str
    path: str
    isthmus: dict[str, Any] = field(default_factory=dict)
    num_calls: int = 0
    status: int = 0
    failed: str = ""


class AgentProxy:
    """`turns`: what the answers of an agent's main talk are to be, one after the other."""

    def __init__(self, url: str, turns: Iterable[str]) -> None:
        self.seen: list[Turn] = []
        self._turns = deque(turns)
        self._offered: set[str] = set()  # in the main talk
        self._http = httpx.AsyncClient(base_url=url, timeout=120)
        routes = [Route("/{path:path}", self._forward, methods=["GET", "POST"])]
        self.app = Starlette(routes=routes)

    @property
    def main(self) -> list[Turn]:
        return [turn for turn in self.seen if turn.kind != ASIDE]

    async def _forward(self, request: Request) -> Response:
        path, content = request.url.path, await request.body()
        headers = {
            name: value
            for name, value in request.headers.items()
            if name not in ("host", "content-length", "accept-encoding", "connection")
        }
        turn = Turn(ASIDE, path)
        if request.method == "POST" and path.endswith(("/chat/completions", "/responses", "/messages")):
            body = json.loads(content)
            self._ask(body, turn)
            if turn.kind == PARALLEL:
                await self._find_seed(path, headers, body, turn)
            content = json.dumps(body).encode()
            self.seen.append(turn)
        sent = self._http.build_request(request.method, path, content=content, headers=headers)
        answer = await self._http.send(sent, stream=True)
        turn.status = answer.status_code
        kept = {
            name: value
            for name, value in answer.headers.items()
            if name not in ("content-length", "transfer-encoding", "content-encoding", "connection", "date")
        }
        return StreamingResponse(self._relayed(answer, turn), answer.status_code, kept)

    async def _relayed(self, answer: httpx.Response, turn: Turn) -> AsyncIterator[bytes]:
        said = bytearray()
        try:
            async for piece in answer.aiter_bytes():
                said += piece
                yield piece
        finally:
            await answer.aclose()
            _note(bytes(said), turn)

    def _ask(self, body: dict[str, Any], turn: Turn) -> None:
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            body.pop(name, None)
        limit = "max_output_tokens" if turn.path.endswith("/responses") else "max_tokens"
        body[limit] = _MOST_TOKENS
        tools = {tool.get("name", ""): tool for tool in map(_function, body.get("tools") or ())}
        shell = next((tools[name] for name in SHELLS if name in tools), None)
        self._offered = self._offered or (set(tools) if shell else set())
        if shell is None or set(tools) != self._offered:
            body[limit] = 8
            return
        turn.kind = self._turns.popleft() if self._turns else ANSWER
        arguments = dict(SHELLS[shell["name"]])
        if turn.kind == SUBMIT:
            arguments["command"] = _SUBMIT
        schema = "input_schema" if turn.path.endswith("/messages") else "parameters"
        declared = shell[schema]["properties"]
        shell[schema] = {
            "type": "object",
            "properties": {name: {"const": value} for name, value in arguments.items() if name in declared},
            "required": [name for name in arguments if name in declared],
            "additionalProperties": False,
        }
        body["seed"] = 1
        if turn.kind == ANSWER:
            body["tool_choice"] = {"type": "none"} if turn.path.endswith("/messages") else "none"
            body["structured_outputs"] = {"regex": _SAID.replace(".", "[.]")}
            return
        body["tool_choice"] = _choice(turn.path, shell["name"], turn.kind == PARALLEL)
        if not turn.path.endswith("/messages"):
            body["parallel_tool_calls"] = turn.kind == PARALLEL

    async def _find_seed(self, path: str, headers: dict[str, str], body: dict[str, Any], turn: Turn) -> None:
        """One with which the model calls twice or thrice; an answer depends on its seed alone."""
        for seed in range(_SEEDS):
            tried = {**body, "seed": seed, "stream": False, "stream_options": None}
            answer = await self._http.post(path, json=tried, headers=headers)
            if 2 <= _num_calls(answer.json()) <= 3:
                body["seed"] = seed
                return


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    inner = tool.get("function")
    return inner if isinstance(inner, dict) else tool


def _choice(path: str, name: str, may_repeat: bool) -> Any:
    if path.endswith("/messages"):
        return {"type": "tool", "name": name, "disable_parallel_tool_use": not may_repeat}
    if path.endswith("/responses"):
        return {"type": "function", "name": name}
    return {"type": "function", "function": {"name": name}}


def _num_calls(answer: dict[str, Any]) -> int:
    if "choices" in answer:
        return len(answer["choices"][0].get("message", {}).get("tool_calls") or ())
    parts = answer.get("output") or answer.get("content") or ()
    return sum(part.get("type") in ("function_call", "tool_use") for part in parts)


def _note(said: bytes, turn: Turn) -> None:
    """What the router told of the answer, in whichever API's stream, or whole."""
    if turn.status != 200:
        turn.failed = said.decode()
        return
    lines = said.decode().splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    for text in events or [said.decode()]:
        try:
            event = json.loads(text)
        except ValueError:
            continue
        inner = event.get("response", event)
        turn.isthmus = inner.get("isthmus") or turn.isthmus
        turn.num_calls += _calls_begun(event)


def _calls_begun(event: dict[str, Any]) -> int:
    if event.get("type") == "response.output_item.added":
        return int(event["item"]["type"] == "function_call")
    if event.get("type") == "content_block_start":
        return int(event["content_block"]["type"] == "tool_use")
    if event.get("object") == "chat.completion.chunk":
        deltas = [choice["delta"].get("tool_calls") or () for choice in event["choices"]]
        return sum("id" in call for each in deltas for call in each)
    return _num_calls(event)
