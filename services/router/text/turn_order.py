"""A chat's turns are put into an order that its template takes and shows. Trials find these orders when the
template is loaded; where it takes an order, the turns stay as the client sent them.

    system a, system b, user c        ->  system a+b, user c
    user a, assistant b, system c     ->  user a, assistant b, user c
    user a, user b                    ->  user a+b
    system a, user b                  ->  user a+b                       A system turn is not taken.
    ... tool c, user d                ->  ... tool c, assistant, user d  Turns must alternate.
    assistant calls f and g, tools    ->  assistant calls f, tool, assistant calls g, tool

The result for a turn depends only on the turns before it, so that a growing chat's prompt keeps its prefix.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from services.router.text.chat_turns import Content, Turn

SYSTEM_ROLES = ("system", "developer")
_JOINT = "\n\n"
# An assistant says this between a tool's result and a user who did not wait for the answer.
_BRIDGE = Turn("assistant", "Done.")


class SystemPlace(Enum):
    OWN = "in a turn of its own"
    FIRST_USER = "before the first user's text"
    LAST_USER = "before the last user's text, where the template itself has it unless a tool answers"


@dataclass(frozen=True, slots=True)
class TurnOrder:
    """A template takes and shows these: developer turns, several leading system turns, system turns after
    others in their place, adjacent turns of one role, tools' results, several calls in a turn. `bridges` says
    that it refuses a user turn after a tool's result, but takes one after an assistant turn."""

    developers: bool = False
    system: SystemPlace = SystemPlace.OWN
    leading: bool = True
    late: bool = True
    users: bool = True
    assistants: bool = True
    results: bool = True
    several_calls: bool = True
    bridges: bool = False


@dataclass(frozen=True, slots=True)
class PlacedTurn:
    """This is a turn with the indices of its messages. A part of a message has its index twice."""

    turn: Turn
    origins: tuple[int, ...]


def arrange(turns: Sequence[Turn], order: TurnOrder) -> list[PlacedTurn]:
    """Return the turns in the template's order. A developer turn, OpenAI's newer name for a system turn,
    becomes a system turn where the template knows no developer."""
    if not order.developers:
        turns = [replace(turn, role="system") if turn.role == "developer" else turn for turn in turns]
    placed = [PlacedTurn(turn, (index,)) for index, turn in enumerate(turns)]
    if not order.several_calls:
        placed = _with_calls_apart(placed)
        turns = [each.turn for each in placed]
    num_leading = _num_leading(turns)
    leading, rest = placed[:num_leading], placed[num_leading:]
    roles = (() if order.late else SYSTEM_ROLES) + (() if order.results else ("tool",))
    rest = [_as_user(each) if each.turn.role in roles else each for each in rest]
    if leading and not (order.leading and order.system is SystemPlace.OWN):
        leading = [_joined(leading)]
    if leading and order.system is not SystemPlace.OWN:
        leading, rest = [], _folded(leading[0], rest, order.system)
    if order.bridges:
        rest = _bridged(rest)
    return [*leading, *_without_neighbours(rest, order)]


def _with_calls_apart(placed: Sequence[PlacedTurn]) -> list[PlacedTurn]:
    apart, at = list[PlacedTurn](), 0
    while at < len(placed):
        each, at = placed[at], at + 1
        if len(each.turn.calls) < 2:
            apart.append(each)
            continue
        num_results = next(
            (n for n, later in enumerate(placed[at:]) if later.turn.role != "tool"), len(placed) - at
        )
        results, at = list(placed[at : at + num_results]), at + num_results
        for number, call in enumerate(each.turn.calls):
            part = each.turn if number == 0 else replace(each.turn, content="", reasoning="")
            apart.append(PlacedTurn(replace(part, calls=(call,)), each.origins * 2))
            apart += [results.pop(index) for index in _result_of(call.id, results)]
        apart += results
    return apart


def _result_of(call_id: str, results: Sequence[PlacedTurn]) -> list[int]:
    for wanted in (call_id, ""):
        for index, result in enumerate(results):
            if result.turn.tool_call_id == wanted:
                return [index]
    return []


def _num_leading(turns: Sequence[Turn]) -> int:
    return next((i for i, turn in enumerate(turns) if turn.role not in SYSTEM_ROLES), len(turns))


def _as_user(placed: PlacedTurn) -> PlacedTurn:
    return replace(placed, turn=replace(placed.turn, role="user", tool_call_id="", name=""))


def _folded(system: PlacedTurn, rest: list[PlacedTurn], place: SystemPlace) -> list[PlacedTurn]:
    users = [index for index, each in enumerate(rest) if each.turn.role == "user"]
    if not users or (place is SystemPlace.FIRST_USER and users[0] != 0):
        return [_as_user(system), *rest]
    at = users[0 if place is SystemPlace.FIRST_USER else -1]
    return [*rest[:at], _joined([_as_user(system), rest[at]]), *rest[at + 1 :]]


def _bridged(placed: list[PlacedTurn]) -> list[PlacedTurn]:
    bridged: list[PlacedTurn] = []
    for each in placed:
        if bridged and bridged[-1].turn.role == "tool" and each.turn.role == "user":
            bridged.append(PlacedTurn(_BRIDGE, ()))
        bridged.append(each)
    return bridged


def _without_neighbours(placed: list[PlacedTurn], order: TurnOrder) -> list[PlacedTurn]:
    runs: list[list[PlacedTurn]] = []
    for each in placed:
        if runs and _are_joined(runs[-1][-1].turn, each.turn, order):
            runs[-1].append(each)
        else:
            runs.append([each])
    return [run[0] if len(run) == 1 else _joined(run) for run in runs]


def _are_joined(first: Turn, second: Turn, order: TurnOrder) -> bool:
    if first.role != second.role or first.calls:  # Content after calls must not move before them.
        return False
    takes = {"user": order.users, "assistant": order.assistants}
    return not takes.get(first.role, True)


def _joined(placed: Sequence[PlacedTurn]) -> PlacedTurn:
    first, turns = placed[0].turn, [each.turn for each in placed]
    contents = [turn.content for turn in turns if turn.content]
    turn = replace(
        first,
        content=_joined_content(contents),
        reasoning=_JOINT.join(turn.reasoning for turn in turns if turn.reasoning),
        calls=tuple(call for turn in turns for call in turn.calls),
        name=first.name if all(turn.name == first.name for turn in turns) else "",
    )
    return PlacedTurn(turn, tuple(index for each in placed for index in each.origins))


def _joined_content(contents: Sequence[Content]) -> Content:
    if all(isinstance(content, str) for content in contents):
        return _JOINT.join(contents)  # type: ignore[arg-type]
    parts: list[str] = []
    for content in contents:
        first, *others = [content] if isinstance(content, str) else content
        if parts:
            parts[-1] += _JOINT + first
        else:
            parts.append(first)
        parts += others
    return parts


# -- what is tried ------------------------------------------------------------------------------------

Render = Callable[[Sequence[Turn]], str]
_ROLES = {"S": "system", "D": "developer", "U": "user", "A": "assistant"}


def find_order(render: Render, loop: Sequence[Turn], *, names_developers: bool) -> TurnOrder:
    """Return the order. `render` renders a chat with the template, and returns "" where it refuses it. `loop`
    is a question, a call and its result, without a call where the template writes none."""
    trial = _Trial(render, loop)
    if not trial.shows("U"):  # Nothing can be found out then.
        return TurnOrder(developers=names_developers)
    developers = names_developers and trial.shows("DU")
    roles = "SD" if developers else "S"
    results = trial.shows("L")
    return TurnOrder(
        developers=developers,
        system=_find_system(trial, roles),
        leading=all(trial.shows(f"{first}{second}U") for first in roles for second in roles),
        late=all(trial.shows_late(role) for role in roles),
        users=trial.shows("UU") and trial.shows("UAUU"),
        assistants=trial.shows("UAAU"),
        results=results,
        bridges=results and not trial.shows("LU") and trial.shows("LBU"),
    )


def _find_system(trial: "_Trial", roles: str) -> SystemPlace:
    chats = [chat for chat in ("U", "UAU", "UAUAU", "L") if trial.shows(chat)]
    if all(trial.shows(role + chat) for role in roles for chat in chats):
        return SystemPlace.OWN
    is_last = trial.shows("SU") and trial.shows("SUAU") and trial.is_before_last_user()
    return SystemPlace.LAST_USER if is_last else SystemPlace.FIRST_USER


class _Trial:
    """Letters are the turns of a chat: S, D, U and A by role, L for the loop, B for the bridge."""

    def __init__(self, render: Render, loop: Sequence[Turn]) -> None:
        self._render = render
        self._loop = loop

    def shows(self, chat: str) -> bool:
        return min(self._places(chat), default=-1) >= 0

    def shows_late(self, role: str) -> bool:
        before = [chat for chat in ("U", "SUA", "L") if self.shows(chat)]
        return all(self._shows_in_order(chat + role) for chat in before) and self._shows_in_order(
            f"UA{role}U"
        )

    def _shows_in_order(self, chat: str) -> bool:
        places = self._places(chat)
        return min(places, default=-1) >= 0 and places == sorted(places)

    def is_before_last_user(self) -> bool:
        system, first, answer, last = self._turns("SUAU")
        joined = _joined([_as_user(PlacedTurn(system, ())), PlacedTurn(last, ())]).turn
        rendered = self._render([system, first, answer, last])
        return bool(rendered) and rendered == self._render([first, answer, joined])

    def _places(self, chat: str) -> list[int]:
        """Return the places of the turns' texts: -1 for a missing one, none for a chat that is refused."""
        turns = self._turns(chat)
        rendered = self._render(turns)
        texts = [turn.content for turn in turns if turn.content and turn is not _BRIDGE]
        return [rendered.find(str(text)) for text in texts] if rendered else []

    def _turns(self, chat: str) -> list[Turn]:
        turns: list[Turn] = []
        for letter in chat:
            if letter == "L":
                turns += [turn if turn.calls else replace(turn, content=chance()) for turn in self._loop]
            else:
                turns.append(_BRIDGE if letter == "B" else Turn(_ROLES[letter], chance()))
        return turns


def chance() -> str:
    return secrets.token_hex(16)
