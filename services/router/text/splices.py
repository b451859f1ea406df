"""This module finds where the ids of past answers go in a rendered chat. It is pure.

Sentinels replace parts of an answer while the template renders: its thinking, its content, and an argument of
each of its calls.

    <|assistant|><think>R</think><tool_call>{"name": "f", "arguments": {"x": "A0"}}</tool_call><|end|>
    |-- stem ---|       |---------------------------------------------------|              |-- tail --|
                 |--------------- the ids that were generated ---------------------------|

The stem is the common part of the header and the prompt that the answer was generated from. What that prompt
wrote after it (`<think>`, where templates begin the thinking) goes before the ids.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from services.router.text.answer_message import AnswerCall
from services.router.text.chat_turns import Turn

_MOST_UNSEEN = 64  # After so many, no more are searched for.
_MIN_STEM = 4  # Fewer characters may be the beginning of any marker.


@dataclass(frozen=True, slots=True)
class Sentinels:
    """`stem` is random, so that no message needs to be searched for it."""

    stem: str

    def stand_in(self, turn: Turn, index: int) -> Turn:
        """Return `turn` with sentinels. Content beside calls needs none, and some templates refuse it."""
        calls = tuple(
            replace(call, arguments=f'{{"x": "{self._of(index, number)}"}}')
            for number, call in enumerate(turn.calls)
        )
        return replace(
            turn,
            content="" if calls else self._of(index, "c"),
            reasoning=self._of(index, "r") if turn.reasoning else "",
            calls=calls,
        )

    def _of(self, index: int, what: str | int) -> str:
        return f"{self.stem}x{index}x{what}y"

    def find(self, rendered: str) -> "list[Written]":
        found: list[Written] = []
        for match in re.finditer(f"{self.stem}x([0-9]+)x(r|c|[0-9]+)y", rendered):
            index, what = int(match[1]), match[2]
            if found and found[-1].index == index:
                found[-1] = replace(found[-1], end=match.end(), parts=(*found[-1].parts, what))
            else:
                found.append(Written(index, match.start(), match.end(), (what,)))
        return found


@dataclass(frozen=True, slots=True)
class Written:
    """This turn is in rendered[start:end] with its sentinels; `parts` are r, c or numbers of calls."""

    index: int
    start: int
    end: int
    parts: tuple[str, ...]

    def is_once(self, turn: Turn) -> bool:
        expected = [str(number) for number in range(len(turn.calls))] or ["c"]
        return [part for part in self.parts if part != "r"] == expected and self.parts.count("r") <= 1

    @property
    def shows_reasoning(self) -> bool:
        return "r" in self.parts


@dataclass(frozen=True, slots=True)
class Frame:
    """A template writes this around an answer of some shape: `lead` before its first sentinel, `tail` after
    the last; `prompt` is the generation prompt before it. `inner_lead` is the lead where other turns follow;
    Qwen3's template writes an empty thinking only for the last turn."""

    lead: str
    tail: str
    prompt: str
    inner_lead: str

    @property
    def stem(self) -> str:
        texts = (self.prompt, self.lead, self.inner_lead)
        differ = (at for at, shown in enumerate(zip(*texts, strict=False)) if len(set(shown)) > 1)
        stem = self.prompt[: next(differ, min(map(len, texts)))]
        return stem if len(stem) >= _MIN_STEM else ""

    def split_lead(self, before: str) -> tuple[str, str] | None:
        """Split `before`, which ends with a turn's header, after its stem, or return None."""
        if self.stem:
            head, stem, rest = before.rpartition(self.stem)
            return (head + stem, rest) if stem else None
        if self.prompt or not before.endswith(self.lead):
            return None
        return before[: len(before) - len(self.lead)], ""

    def begun(self, prompt_end: str) -> str:
        """Return what a prompt wrote after the stem; `prompt_end` is empty where it is not known."""
        _, stem, rest = prompt_end.rpartition(self.stem) if self.stem else ("", "", "")
        return rest if stem else self.prompt[len(self.stem) :]

    def skip_tail(self, after: str, answer_end: str | None, end_markers: Sequence[str]) -> int | None:
        """Return how many characters of `after`, the text after the last sentinel of a turn's calls, the
        answer's ids stand for. They go up to the end marker or, where the answer was cut off earlier, as far
        as its text, which ends with `answer_end`. Return None where the text is not as expected."""
        skipped = self._up_to_marker(end_markers)
        if not after.startswith(skipped):
            return None
        return len(skipped) if answer_end is None else _covered(skipped, answer_end) or None

    def skip_marker(self, after: str, end_markers: Sequence[str]) -> int:
        """Return the same count after content: what is between it and the template's end marker."""
        skipped = self._up_to_marker(end_markers) if self.ends_with(end_markers) else ""
        return len(skipped) if after.startswith(skipped) else 0

    def ends_with(self, end_markers: Sequence[str]) -> bool:
        return any(marker in self.tail for marker in end_markers)

    def _up_to_marker(self, end_markers: Sequence[str]) -> str:
        ends = [self.tail.find(marker) for marker in end_markers if marker in self.tail]
        return self.tail[: min(ends)] if ends else self.tail.rstrip()


def _covered(tail: str, answer_end: str) -> int:
    """Return how much of `tail` the answer has written; its last value may not have been a quoted text."""
    for length in range(len(tail), 0, -1):
        written = tail[:length].lstrip('"')
        if written and answer_end.endswith(written):
            return length
    return 0


def unseen(rendered: str, turns: Iterable[tuple[int, Turn]]) -> list[int]:
    """Return the indices of turns whose text the template did not write after that of the turn before, as it
    is or as JSON: it may be missing or written differently. Content beside calls is ignored, as many
    templates cannot show it."""
    at, missed = 0, list[int]()
    for index, turn in turns:
        behind = _behind(turn, rendered, at) if len(missed) < _MOST_UNSEEN else None
        if behind is None:
            missed.append(index)
        else:
            at = behind
    return missed


def _behind(turn: Turn, rendered: str, at: int) -> int | None:
    texts = [turn.content] if isinstance(turn.content, str) else turn.content
    for text in [] if turn.calls else map(str.strip, texts):
        begin = rendered.find(text, at)
        if begin < 0:
            text = json.dumps(text, ensure_ascii=False)[1:-1]
            begin = rendered.find(text, at)
        if begin < 0:
            return None
        at = begin + len(text)
    return at


def example_after(turn: Turn) -> list[Turn]:
    results = [Turn("tool", "x", tool_call_id=call.id, name=call.name) for call in turn.calls]
    return results or [Turn("user", "x")]


def example_before(role: str | None) -> list[Turn]:
    question, call = Turn("user", "x"), AnswerCall("call_0123456789abcdef", "f", "{}")
    match role:
        case "tool":
            return [
                question,
                Turn("assistant", calls=(call,)),
                Turn("tool", "x", tool_call_id=call.id, name="f"),
            ]
        case "assistant":
            return [question, Turn("assistant", "x")]
    return [question]
