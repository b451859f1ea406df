"""Lines that begin with a slash are for the chat itself."""

import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.json_format import MessageToDict

from services.cli.chat.conversation import Conversation
from services.cli.chat.session import Session
from services.cli.chat.turn_figures import placed, statistics
from services.cli.look.explain import format_explanation
from services.settings.parser import nearest
from services.values.errors import InvalidRequest


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
    said = "is set" if text else "is taken out"
    session.display.aside(
        f"the system message {said}: prompts begin otherwise now, so the next turn finds less"
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
    """Obey a `line` that begins with a slash. Raises InvalidRequest where there is no such command."""
    name, _, argument = line[1:].partition(" ")
    if name not in CHAT_COMMANDS:
        meant = nearest(f"/{name}", [f"/{known}" for known in CHAT_COMMANDS])
        raise InvalidRequest(f"there is no command /{name}{meant} (/help lists them)")
    await CHAT_COMMANDS[name].act(session, argument.strip())


def _write(conversation: Conversation, path: Path) -> None:
    """Write it to a file. Raises OSError; FileExistsError where there is one already."""
    is_json = path.suffix == ".json"
    text = _as_json(conversation) if is_json else "\n".join(_as_lines(conversation))
    with path.open("x", encoding="utf-8") as file:
        file.write(text)


def _as_json(conversation: Conversation) -> str:
    said = {
        "conversation_id": conversation.id,
        "messages": [MessageToDict(m, preserving_proto_field_name=True) for m in conversation.messages()],
        "turns": [
            MessageToDict(turn.answer.finish, preserving_proto_field_name=True)
            for turn in conversation.turns
            if turn.answer.finish is not None
        ],
    }
    return json.dumps(said, ensure_ascii=False, indent=2) + "\n"


def _as_lines(conversation: Conversation) -> Iterator[str]:
    for message in conversation.messages():
        yield f"{message.role}:\n{message.content}\n"
        yield from (f"calls {call.name} {call.arguments}\n" for call in message.tool_calls)
