"""A tool constraint says as a grammar what an answer with tools, or behind thinking, must be. Pure.

must call         thinking? calls
strict tools      thinking? (content calls)* content         calls by their schemas
another grammar   thinking? calls | what it says             calls where there are tools
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.router.parsing.call_grammars import Lark, Writing, one_of
from services.router.parsing.harmony import CHANNEL, MESSAGE, START
from services.router.parsing.marked import NO_WRAPPING, Thinking, Wrapping

_BLANK = r'("\n" | "\n\n" | "\n\n\n")? '
_CONSTRAINED = "<|constrain|>"


@dataclass(frozen=True, slots=True)
class ToolConstraint:
    """`schemas` are those of the tools that may be called, by name. `thinks` says that the prompt ended
    within thinking."""

    lark: Lark
    schemas: Mapping[str, Any]
    parallel: bool = True
    thinks: bool = False


@dataclass(frozen=True, slots=True)
class MarkedWriting:
    """It writes an answer as marked.py reads it. Where `writing` is None nothing is called."""

    thinking: Thinking | None
    writing: Writing | None
    wrapping: Wrapping = NO_WRAPPING

    @property
    def binds_calls(self) -> bool:
        return self.writing is not None

    def must_call(self, asked: ToolConstraint) -> str:
        return asked.lark.grammar(f"{self._thought(asked)}{self._calls(asked)}")

    def may_call(self, asked: ToolConstraint) -> str:
        lark = asked.lark
        writing = self._known(lark)
        thought = self._thought(asked)
        if writing.begins:
            plain = lark.text((writing.opens, *writing.also), begins_without=writing.begins)
            return lark.grammar(f"{thought}{one_of(self._calls(asked), plain)}")
        opens = (writing.opens, *writing.also)
        # What closes calls holds several, others follow one another.
        calls = writing.calls(lark, asked.schemas, asked.parallel and bool(writing.closes))
        more = "*" if asked.parallel else "?"
        answer = f"({lark.upto(writing.opens, opens)} {calls}){more} {lark.text(opens)}"
        return lark.grammar(f"{thought}{self._wrapped(lark, answer)}")

    def then(self, asked: ToolConstraint, answer: str) -> str:
        """`answer` is a rule's body."""
        calls = [self._calls(asked)] if asked.schemas and self.writing else []
        answers = one_of(*calls, self._wrapped(asked.lark, answer))
        return asked.lark.grammar(f"{self._thought(asked)}{answers}")

    def _wrapped(self, lark: Lark, answer: str) -> str:
        if not self.wrapping.opens:
            return answer
        opens, closes = (
            one_of(*map(lark.literal, each)) for each in (self.wrapping.opens, self.wrapping.closes)
        )
        return f"({opens} {_BLANK})? {answer} ({_BLANK} {closes})?"

    def _calls(self, asked: ToolConstraint) -> str:
        writing = self._known(asked.lark)
        calls = writing.calls(asked.lark, asked.schemas, asked.parallel)
        opens = f"{asked.lark.literal(writing.opens)} " if writing.opens else ""
        return f"{_BLANK}{opens}{calls}"

    def _known(self, lark: Lark) -> Writing:
        assert self.writing is not None
        return self.writing.known_to(lark)

    def _thought(self, asked: ToolConstraint) -> str:
        if self.thinking is None:
            return ""
        lark = asked.lark
        rest = f"{lark.upto(self.thinking.closes)} {_BLANK}"
        return rest if asked.thinks else f'("\\n"? {lark.literal(self.thinking.opens)} {rest})? '


class HarmonyWriting:
    """It writes an answer as harmony.py reads it: its last message is a call, which ends it, or final."""

    binds_calls = True

    def must_call(self, asked: ToolConstraint) -> str:
        return asked.lark.grammar(f"{self._before(asked.lark)}{self._call(asked)}")

    def may_call(self, asked: ToolConstraint) -> str:
        return self._then(asked, asked.lark.text(), ("analysis", "commentary"))

    def then(self, asked: ToolConstraint, answer: str) -> str:
        return self._then(asked, answer, ("analysis",))

    def _then(self, asked: ToolConstraint, answer: str, channels: tuple[str, ...]) -> str:
        lark = asked.lark
        final = f"{lark.literal(f'{CHANNEL}final{MESSAGE}')} {answer}"
        calls = [self._call(asked)] if asked.schemas else []
        return lark.grammar(f"{self._before(lark, channels)}{one_of(*calls, final)}")

    @staticmethod
    def _before(lark: Lark, channels: tuple[str, ...] = ("analysis",)) -> str:
        begins = one_of(*(lark.literal(f"{CHANNEL}{channel}{MESSAGE}") for channel in channels))
        return f"({begins} {lark.text()} {lark.literal(f'<|end|>{START}assistant')})* "

    @staticmethod
    def _call(asked: ToolConstraint) -> str:
        """The recipient stands behind the channel, as models write it, or before it, as the template does."""
        lark, calls = asked.lark, []
        for name, schema in asked.schemas.items():
            channel, to = f"{CHANNEL}commentary", f" to=functions.{name}"
            headers = one_of(lark.literal(channel + to), lark.literal(to + channel))
            kinds = one_of(*(lark.literal(f" {kind}json{MESSAGE}") for kind in (_CONSTRAINED, "")))
            calls.append(f"{headers} {kinds} {lark.json(schema)}")
        return lark.rule(one_of(*calls), "call")


AnswerWriting = MarkedWriting | HarmonyWriting
