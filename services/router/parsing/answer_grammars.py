"""A tool constraint gives the grammar of an answer with tools, or of one after thinking. The module is pure.

must call         thinking? calls
strict tools      thinking? (content calls)* content         calls by their schemas
another grammar   thinking? calls | the other grammar        calls where there are tools
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
    """This is the grammar of an answer that marked.py reads. There are no calls where `writing` is None."""

    thinking: Thinking | None
    writing: Writing | None
    wrapping: Wrapping = NO_WRAPPING

    @property
    def binds_calls(self) -> bool:
        return self.writing is not None

    def must_call(self, constraint: ToolConstraint) -> str:
        return constraint.lark.grammar(f"{self._thought(constraint)}{self._calls(constraint)}")

    def may_call(self, constraint: ToolConstraint) -> str:
        lark = constraint.lark
        writing = self._known(lark)
        thought = self._thought(constraint)
        if writing.begins:
            plain = lark.text((writing.opens, *writing.also), begins_without=writing.begins)
            return lark.grammar(f"{thought}{one_of(self._calls(constraint), plain)}")
        opens = (writing.opens, *writing.also)
        # A format with a closing marker has several calls before it; in others calls follow one another.
        calls = writing.calls(lark, constraint.schemas, constraint.parallel and bool(writing.closes))
        more = "*" if constraint.parallel else "?"
        answer = f"({lark.upto(writing.opens, opens)} {calls}){more} {lark.text(opens)}"
        return lark.grammar(f"{thought}{self._wrapped(lark, answer)}")

    def then(self, constraint: ToolConstraint, answer: str) -> str:
        calls = [self._calls(constraint)] if constraint.schemas and self.writing else []
        answers = one_of(*calls, self._wrapped(constraint.lark, answer))
        return constraint.lark.grammar(f"{self._thought(constraint)}{answers}")

    def _wrapped(self, lark: Lark, answer: str) -> str:
        if not self.wrapping.opens:
            return answer
        opens, closes = (
            one_of(*map(lark.literal, each)) for each in (self.wrapping.opens, self.wrapping.closes)
        )
        return f"({opens} {_BLANK})? {answer} ({_BLANK} {closes})?"

    def _calls(self, constraint: ToolConstraint) -> str:
        writing = self._known(constraint.lark)
        calls = writing.calls(constraint.lark, constraint.schemas, constraint.parallel)
        opens = f"{constraint.lark.literal(writing.opens)} " if writing.opens else ""
        return f"{_BLANK}{opens}{calls}"

    def _known(self, lark: Lark) -> Writing:
        assert self.writing is not None
        return self.writing.known_to(lark)

    def _thought(self, constraint: ToolConstraint) -> str:
        if self.thinking is None:
            return ""
        lark = constraint.lark
        rest = f"{lark.upto(self.thinking.closes)} {_BLANK}"
        return rest if constraint.thinks else f'("\\n"? {lark.literal(self.thinking.opens)} {rest})? '


class HarmonyWriting:
    """This is the grammar of an answer that harmony.py reads: at last comes a call or `final`."""

    binds_calls = True

    def must_call(self, constraint: ToolConstraint) -> str:
        return constraint.lark.grammar(f"{self._before(constraint.lark)}{self._call(constraint)}")

    def may_call(self, constraint: ToolConstraint) -> str:
        return self._then(constraint, constraint.lark.text(), ("analysis", "commentary"))

    def then(self, constraint: ToolConstraint, answer: str) -> str:
        return self._then(constraint, answer, ("analysis",))

    def _then(self, constraint: ToolConstraint, answer: str, channels: tuple[str, ...]) -> str:
        lark = constraint.lark
        final = f"{lark.literal(f'{CHANNEL}final{MESSAGE}')} {answer}"
        calls = [self._call(constraint)] if constraint.schemas else []
        return lark.grammar(f"{self._before(lark, channels)}{one_of(*calls, final)}")

    @staticmethod
    def _before(lark: Lark, channels: tuple[str, ...] = ("analysis",)) -> str:
        begins = one_of(*(lark.literal(f"{CHANNEL}{channel}{MESSAGE}") for channel in channels))
        return f"({begins} {lark.text()} {lark.literal(f'<|end|>{START}assistant')})* "

    @staticmethod
    def _call(constraint: ToolConstraint) -> str:
        """Allow the recipient after the channel, as models write it, or before it, as the template does."""
        lark, calls = constraint.lark, []
        for name, schema in constraint.schemas.items():
            channel, to = f"{CHANNEL}commentary", f" to=functions.{name}"
            headers = one_of(lark.literal(channel + to), lark.literal(to + channel))
            kinds = one_of(*(lark.literal(f" {kind}json{MESSAGE}") for kind in (_CONSTRAINED, "")))
            calls.append(f"{headers} {kinds} {lark.json(schema)}")
        return lark.rule(one_of(*calls), "call")


AnswerWriting = MarkedWriting | HarmonyWriting
