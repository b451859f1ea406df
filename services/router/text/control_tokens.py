"""Control tokens that are written in a message's text, such as <|im_end|>, stay text and control nothing.

A chat template writes control tokens and the clients' texts into one text, and a tokenizer cannot tell the
source of a `<|im_end|>` in it: a user could end the turn and write a system turn. So those in messages are
hidden before the template renders, and the rendered text is encoded by a tokenizer that knows the control
tokens by secret names:

    message     a <|im_end|> b                          is hidden as  a 3f..0k b
    rendered    <|im_start|>user\\na 3f..0k b<|im_end|>
    encoded     |0|user\\na <|im_end|> b|1|             |0| and |1| are control tokens, <|im_end|> is text

A chat without such text is not changed. A template that looks for a control token in a message does not find
it.
"""

import json
import re
import secrets
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any

from tokenizers import AddedToken, Tokenizer

from services.router.text.answer_message import AnswerCall
from services.router.text.chat_turns import ChatTurns, Turn
from services.values.errors import InvalidRequest


class ControlTokens:
    """`added` are a tokenizer's added tokens by their ids. `backend` is not changed."""

    def __init__(self, backend: Tokenizer, added: Mapping[int, AddedToken]) -> None:
        self._stem = secrets.token_hex(16)
        self._texts = [token.content for token in added.values() if token.special and token.content]
        self._numbers = {text: number for number, text in enumerate(self._texts)}
        self._pattern = _pattern_of(self._texts)
        self._in_dump = _pattern_of([_dump(text)[1:-1] for text in self._texts])
        self._hidden = re.compile(f"{self._stem}x([0-9]+)k")
        self._renamed, self._ids = self._rename(backend, added)

    def hide(self, chat: ChatTurns) -> ChatTurns | None:
        """Return the chat with names in place of the control tokens in its texts, or None where it has none.
        A last turn that is continued stays as it is, as the model wrote it.

        Raises InvalidRequest where the JSON is nested too deeply.
        """
        last = len(chat.turns) - 1 if chat.continues else len(chat.turns)
        hidden = replace(
            chat,
            turns=[*map(self._in_turn, chat.turns[:last]), *chat.turns[last:]],
            tools=self._in_json(chat.tools, "chat.tools"),
            variables=self._in_json(chat.variables, "chat.chat_template_kwargs"),
        )
        return None if hidden == chat else hidden

    def show(self, text: str) -> str:
        return self._hidden.sub(lambda match: self._texts[int(match[1])], text)

    def encode(self, rendered: str) -> list[int]:
        renamed = self._pattern.sub(lambda match: self._name(self._numbers[match[0]]), rendered)
        encoding = self._renamed.encode(self.show(renamed), add_special_tokens=False)
        return [self._ids.get(id_, id_) for id_ in encoding.ids]

    def encodes_otherwise(self, backend: Tokenizer, added: Mapping[int, AddedToken]) -> str:
        """Return a text that `backend` encodes differently, so that this class must not replace it, or ""
        where none is found. Tokenizers may search for a token behind their normalizer, or only between
        spaces, or find another one that begins before it, which does not work with the secret names."""
        others = [token.content for token in added.values() if token.content and not token.special]
        for text in (*map(_among_others, self._texts), *_overlapping(self._texts, others)):
            if self.encode(text) != backend.encode(text, add_special_tokens=False).ids:
                return text
        return ""

    def _in_text(self, text: str) -> str:
        return self._pattern.sub(lambda match: f"{self._stem}x{self._numbers[match[0]]}k", text)

    def _in_parts(self, parts: Sequence[str]) -> Sequence[str]:
        """Hide control tokens in parts, which templates may join: one that spans parts, where it begins."""
        joined, ends = "".join(parts), list(accumulate(map(len, parts)))
        hidden: list[list[str]] = [[] for _ in parts]
        at = 0
        for match in self._pattern.finditer(joined):
            _put(hidden, ends, joined, at, match.start())
            hidden[bisect_right(ends, match.start())].append(self._in_text(match[0]))
            at = match.end()
        _put(hidden, ends, joined, at, len(joined))
        return ["".join(texts) for texts in hidden]

    def _in_turn(self, turn: Turn) -> Turn:
        content = turn.content
        return replace(
            turn,
            content=self._in_text(content) if isinstance(content, str) else self._in_parts(content),
            reasoning=self._in_text(turn.reasoning),
            calls=tuple(map(self._in_call, turn.calls)),
            tool_call_id=self._in_text(turn.tool_call_id),
            name=self._in_text(turn.name),
        )

    def _in_call(self, call: AnswerCall) -> AnswerCall:
        arguments = self._in_arguments(call.arguments)
        return replace(call, id=self._in_text(call.id), name=self._in_text(call.name), arguments=arguments)

    def _in_arguments(self, written: str) -> str:
        if "\\" not in written:
            return self._in_text(written)
        with _not_too_deep("chat.messages.tool_calls.arguments"):  # Any character may be escaped.
            value = json.loads(written)
            hidden = self._in_value(value)
            is_same = hidden == value and not self._pattern.search(written)
            return written if is_same else _dump(hidden)

    def _in_json(self, value: Any, name: str) -> Any:
        """Search the whole dump before its values, as tools have thousands of texts."""
        with _not_too_deep(name):
            return self._in_value(value) if self._in_dump.search(_dump(value)) else value

    def _in_value(self, value: Any) -> Any:
        match value:
            case str():
                return self._in_text(value)
            case list():
                return [self._in_value(each) for each in value]
            case Mapping():
                return {self._in_text(key): self._in_value(each) for key, each in value.items()}
        return value

    def _name(self, number: int) -> str:
        return f"\ue000{self._stem}{number}\ue001"  # No model was trained with characters of private use.

    def _rename(
        self, backend: Tokenizer, added: Mapping[int, AddedToken]
    ) -> tuple[Tokenizer, Mapping[int | None, int]]:
        """Return the tokenizer with renamed control tokens, and the right ids of its added tokens. It shares
        the vocabulary."""
        renamed = Tokenizer(backend.model)
        if backend.normalizer is not None:
            renamed.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            renamed.pre_tokenizer = backend.pre_tokenizer
        names = {id_: token.content for id_, token in added.items() if token.content}
        special = {id_: self._name(self._numbers[added[id_].content]) for id_ in names if added[id_].special}
        renamed.add_tokens([added[id_] for id_ in names if id_ not in special])
        renamed.add_special_tokens(
            [
                AddedToken(
                    name,
                    special=True,
                    normalized=added[id_].normalized,
                    single_word=added[id_].single_word,
                    lstrip=added[id_].lstrip,
                    rstrip=added[id_].rstrip,
                )
                for id_, name in special.items()
            ]
        )
        ids = {renamed.token_to_id(name): id_ for id_, name in (names | special).items()}
        return renamed, ids


@contextmanager
def _not_too_deep(name: str) -> Iterator[None]:
    try:
        yield
    except RecursionError as error:
        raise InvalidRequest(name, "cannot be used: its JSON is nested too deeply") from error


def _among_others(control: str) -> str:
    return f"a{control}b {control} c\n{control}{control}"


def _overlapping(controls: Sequence[str], others: Sequence[str]) -> Iterator[str]:
    starts = {text[:length]: text for text in controls for length in range(1, len(text) + 1)}
    whole = _pattern_of(controls)
    for other in others:
        if whole.search(other):
            yield f"a{other}b"
        for length in range(1, len(other) + 1):
            if (control := starts.get(other[-length:])) is not None:
                yield f"a{other}{control[length:]}b"


def _put(parts: list[list[str]], ends: Sequence[int], joined: str, first: int, behind: int) -> None:
    while first < behind:
        index = bisect_right(ends, first)
        end = min(ends[index], behind)
        parts[index].append(joined[first:end])
        first = end


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=dict)


def _pattern_of(texts: Sequence[str]) -> re.Pattern[str]:
    return re.compile(_longest_of(texts) if texts else "(?!)")


def _longest_of(texts: Iterable[str]) -> str:
    """Return a pattern of the longest of the texts at a place. A tree avoids trying a thousand texts with a
    common prefix one by one."""
    by_first: dict[str, list[str]] = {}
    for text in texts:
        by_first.setdefault(text[:1], []).append(text[1:])
    may_end = by_first.pop("", None) is not None
    branches = [re.escape(first) + _longest_of(rests) for first, rests in by_first.items()]
    pattern = f"(?:{'|'.join(branches)})" if len(branches) > 1 or may_end else "".join(branches)
    return f"{pattern}?" if branches and may_end else pattern if branches else ""
