"""`isthmus chat` talks to a model, and shows what the cluster does for each turn.

a turn --Ctrl-C--> Abort to the router; the answer ends with the text that it has so far
       --again---> the call is cancelled, and the turn is dropped

Lines that begin with a slash are commands to the chat itself.
"""

import asyncio
import json
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from google.protobuf.json_format import MessageToDict

from services.cli import chat_terminal, screen
from services.cli.chat_terminal import Plain, Terminal
from services.cli.conversation import ChatTurn, Conversation, StreamedAnswer, placed, statistics
from services.cli.look.explain import format_explanation
from services.cli.router_client import (
    MAX_TOKENS_BOUNDS,
    MODEL_NAME_HELP,
    SEED_BOUNDS,
    ClientConfig,
    key_metadata,
    naming,
    responses,
)
from services.settings.flags import Bounds, check_bounds, load, nearest, setting
from services.values.errors import InvalidRequest, IsthmusError
from services.wire.isthmus.v1 import common_pb2, generation_pb2, generation_pb2_grpc

_ANSWER_TIMEOUT_S = 10.0
_NOT_YET = "no decode rank is there yet: does the cluster still start?"
_Metadata = Sequence[tuple[str, str]]


@dataclass(slots=True)
class Session:
    channel: grpc.aio.Channel
    conversation: Conversation
    display: Plain | Terminal
    router: str
    timeout_s: float
    metadata: _Metadata = ()
    clock: Callable[[], float] = time.monotonic
    _request_id: str = ""  # This is the running turn's id.
    _task: "asyncio.Task[None] | None" = None
    _abort: "asyncio.Task[None] | None" = None
    _stub: generation_pb2_grpc.GenerationStub = field(init=False)

    def __post_init__(self) -> None:
        self._stub = generation_pb2_grpc.GenerationStub(self.channel)

    async def greeting(self) -> str:
        with naming(self.router):
            request = generation_pb2.ListModelsRequest()
            answer = await self._stub.ListModels(request, timeout=_ANSWER_TIMEOUT_S, metadata=self.metadata)
        served = (
            f"{m.id}: {m.prefill_ranks} prefill and {m.decode_ranks} decode ranks" for m in answer.models
        )
        has_ranks = any(model.decode_ranks for model in answer.models)
        return "\n".join([*served, *([] if has_ranks else [_NOT_YET])])

    async def turn(self, question: str) -> None:
        """Request an answer, show it, and remember it with the question.

        If the router's error is raised, as one of ours, the conversation stays as it was.
        """
        answer = StreamedAnswer(self.clock)
        self._request_id, self._task = f"chat-{secrets.token_hex(8)}", asyncio.current_task()
        request = self.conversation.request(question, self._request_id)
        try:
            async for response in responses(
                self.channel, request, self.timeout_s, self.metadata, router=self.router
            ):
                answer.take(response)
                self.display.piece(response)
        except asyncio.CancelledError:
            if self._abort is not None:
                self._abort.cancel()
            raise
        finally:
            self._task, self._abort = None, None
        self.display.end(answer)
        self.conversation.turns.append(ChatTurn(question, answer))

    def interrupt(self) -> None:
        if self._task is None:
            return
        if self._abort is None:
            self._abort = asyncio.create_task(self._send_abort())
        else:
            self._task.cancel()

    async def _send_abort(self) -> None:
        """Send the abort, and ignore an error: the router has ended the turn, or cannot be reached, and then
        the next interrupt cancels the turn.
        """
        request = generation_pb2.AbortRequest(request_id=self._request_id)
        with suppress(grpc.aio.AioRpcError):
            await self._stub.Abort(request, timeout=_ANSWER_TIMEOUT_S, metadata=self.metadata)

    async def explain(self, question: str) -> generation_pb2.ExplainResponse:
        request = generation_pb2.ExplainRequest(request=self.conversation.request(question))
        with naming(self.router):
            answer = await self._stub.Explain(request, timeout=_ANSWER_TIMEOUT_S, metadata=self.metadata)
        assert isinstance(answer, generation_pb2.ExplainResponse)
        return answer


@dataclass(frozen=True, slots=True)
class ChatCommand:
    argument: str
    meaning: str
    act: Callable[[Session, str], Awaitable[None]]


class Leave(Exception):
    pass


async def _explain(session: Session, question: str) -> None:
    turns = session.conversation.turns
    if turns and not question:
        session.display.say(f"{placed(turns[-1].answer)}\n")
    session.display.say(format_explanation(await session.explain(question), session.display.width))


async def _stats(session: Session, _argument: str) -> None:
    session.display.say(statistics(session.conversation.turns, session.display.width))


async def _system(session: Session, text: str) -> None:
    session.conversation.system = text
    change = "is set" if text else "is taken out"
    session.display.aside(
        f"the system message {change}: prompts begin otherwise now, so the next turn finds less"
    )


async def _reset(session: Session, _argument: str) -> None:
    session.conversation.reset()
    session.display.aside("a new conversation")


async def _save(session: Session, name: str) -> None:
    if not name:
        raise InvalidRequest("/save FILE: which file?")
    try:
        _write(session.conversation, Path(name).expanduser())
    except OSError as error:
        raise InvalidRequest(f"/save: {error}") from error
    session.display.aside(f"saved as {name}")


async def _help(session: Session, _argument: str) -> None:
    lines = [f"/{name} {each.argument}".ljust(18) + each.meaning for name, each in CHAT_COMMANDS.items()]
    session.display.say("\n".join([*lines, *_KEYS]))


async def _quit(session: Session, _argument: str) -> None:
    raise Leave


CHAT_COMMANDS = {
    "explain": ChatCommand("[TEXT]", "where the last turn went; the next one's price list", _explain),
    "stats": ChatCommand("", "per turn: prefix found, delta moved, TTFT by stage, tokens/s", _stats),
    "system": ChatCommand("[TEXT]", "set the system message; without TEXT: take it out", _system),
    "reset": ChatCommand("", "begin a new conversation", _reset),
    "save": ChatCommand("FILE", "write the conversation: text, or JSON if FILE ends so", _save),
    "help": ChatCommand("", "this list", _help),
    "quit": ChatCommand("", "leave, as Ctrl-D does", _quit),
}
_KEYS = (
    "Ctrl-C            stop the answer; twice: leave",
    "TEXT \\            the text goes on in the next line",
)


async def obey(session: Session, line: str) -> None:
    name, _, argument = line[1:].partition(" ")
    if name not in CHAT_COMMANDS:
        meant = nearest(f"/{name}", [f"/{known}" for known in CHAT_COMMANDS])
        raise InvalidRequest(f"there is no command /{name}{meant} (/help lists them)")
    await CHAT_COMMANDS[name].act(session, argument.strip())


def _write(conversation: Conversation, path: Path) -> None:
    is_json = path.suffix == ".json"
    text = _as_json(conversation) if is_json else "\n".join(_as_lines(conversation))
    with path.open("x", encoding="utf-8") as file:
        file.write(text)


def _as_json(conversation: Conversation) -> str:
    content = {
        "conversation_id": conversation.id,
        "messages": [MessageToDict(m, preserving_proto_field_name=True) for m in conversation.messages()],
        "turns": [
            MessageToDict(turn.answer.finish, preserving_proto_field_name=True)
            for turn in conversation.turns
            if turn.answer.finish is not None
        ],
    }
    return json.dumps(content, ensure_ascii=False, indent=2) + "\n"


def _as_lines(conversation: Conversation) -> Iterator[str]:
    for message in conversation.messages():
        yield f"{message.role}:\n{message.content}\n"
        yield from (f"calls {call.name} {call.arguments}\n" for call in message.tool_calls)


_LEFT = 130  # Any program that Ctrl-C ends has this code.
_HINT = "/help lists commands; Ctrl-C stops an answer, Ctrl-D leaves"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig(ClientConfig):
    """Talk to a model; lines that begin with / are for the chat itself, /help lists them.

    Past answers are sent as their token ids, so that a turn finds the KV of earlier ones. From a pipe each
    line is a turn, and the answers are printed as plain text.
    """

    model: str = setting("", MODEL_NAME_HELP, bare="MODEL")
    system: str = setting("", "the system message")
    temperature: float | None = setting(
        None, "0 is greedy; default: the model's own", bounds=Bounds(at_least=0)
    )
    max_tokens: int = setting(1024, "tokens of an answer at most", bounds=MAX_TOKENS_BOUNDS)
    seed: int | None = setting(None, "makes sampling repeatable", bounds=SEED_BOUNDS)
    tenant: str = setting("", "tenant; prefixes are not shared between tenants")
    timeout_s: float = setting(600.0, "seconds after which an answer is given up", bounds=Bounds(above=0))
    color: screen.Color = setting("auto", screen.COLOR_HELP)

    def __post_init__(self) -> None:
        check_bounds(self)


def run(argv: list[str]) -> int:
    config = load(ChatConfig, argv, prog="isthmus chat")
    with asyncio.Runner() as runner:
        session = runner.run(_open(config))
        try:
            if sys.stdin.isatty():
                return _talk(runner, session, config)
            return _answer_pipe(runner, session)
        finally:
            runner.run(session.channel.close())


async def _open(config: ChatConfig) -> Session:
    conversation = Conversation(
        lambda: f"chat-{secrets.token_hex(8)}",
        config.system,
        config.model,
        _sampling(config),
        config.tenant,
    )
    display = Terminal(sys.stdout, config.color) if sys.stdin.isatty() else Plain()
    metadata = key_metadata(config.api_key_file)
    channel = config.open_channel()
    return Session(channel, conversation, display, config.router, config.timeout_s, metadata)


def _sampling(config: ChatConfig) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        temperature=config.temperature, max_tokens=config.max_tokens, seed=config.seed
    )


def _answer_pipe(runner: asyncio.Runner, session: Session) -> int:
    for line in chat_terminal.piped():
        try:
            runner.run(_act(session, line))
        except Leave:
            break
    return 0


def _talk(runner: asyncio.Runner, session: Session, config: ChatConfig) -> int:
    session.display.aside(f"{runner.run(session.greeting())}\n{_HINT}")
    for line in _typed(config):
        try:
            runner.run(_interruptible(session, line))
        except Leave:
            return 0
        except IsthmusError as error:
            session.display.error(str(error))
        except asyncio.CancelledError:
            return _LEFT
    return 0


def _typed(config: ChatConfig) -> Iterator[str]:
    is_colored = screen.is_colored(config.color, sys.stdout)
    return chat_terminal.typed([*CHAT_COMMANDS], "Ctrl-C again, or Ctrl-D, leaves", is_colored)


async def _interruptible(session: Session, line: str) -> None:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, session.interrupt)
    try:
        await _act(session, line)
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def _act(session: Session, line: str) -> None:
    if line.startswith("/"):
        await obey(session, line)
    else:
        await session.turn(line)
