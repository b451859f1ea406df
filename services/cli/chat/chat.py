"""`isthmus chat` talks to a model, and shows what the cluster does for each turn."""

import asyncio
import secrets
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from services.cli import screen
from services.cli.chat import lines
from services.cli.chat.chat_commands import CHAT_COMMANDS, Leave, obey
from services.cli.chat.conversation import Conversation
from services.cli.chat.display import Plain, Terminal
from services.cli.chat.session import Session
from services.cli.client import ClientConfig, key_metadata
from services.settings.flags import Bounds, check_bounds, load, setting
from services.values.errors import IsthmusError
from services.wire.isthmus.v1 import common_pb2

_LEFT = 130  # Any program that Ctrl-C ends has this code.
_HINT = "/help lists commands; Ctrl-C stops an answer, Ctrl-D leaves"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig(ClientConfig):
    """Talk to a model; lines that begin with / are for the chat itself, /help lists them.

    Past answers go back as the ids that they were, so that the second turn finds the first one's KV. Piped,
    each line is a turn, and the answers come out as plain text.
    """

    model: str = setting("", "the name it is served under; default: the one that is", bare="MODEL")
    system: str = setting("", "the system message")
    temperature: float | None = setting(
        None, "0 is greedy; default: the model's own", bounds=Bounds(at_least=0)
    )
    max_tokens: int = setting(
        1024, "tokens of an answer at most", bounds=Bounds(at_least=1, at_most=2**31 - 1)
    )
    seed: int | None = setting(
        None, "makes sampling repeatable", bounds=Bounds(at_least=0, at_most=2**64 - 1)
    )
    tenant: str = setting("", "tenant; prefixes are not shared between tenants")
    timeout_s: float = setting(600.0, "give an answer up after so many seconds", bounds=Bounds(above=0))
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
    """Leave a value of None unset: the router then takes the model's own."""
    return common_pb2.SamplingParams(
        temperature=config.temperature, max_tokens=config.max_tokens, seed=config.seed
    )


def _answer_pipe(runner: asyncio.Runner, session: Session) -> int:
    for line in lines.piped():
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
    return lines.typed([*CHAT_COMMANDS], "Ctrl-C again, or Ctrl-D, leaves", is_colored)


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
