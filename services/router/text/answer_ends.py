"""This module finds where an answer ends, by token ids and stop strings, and what of it is the answer's own.
It is pure.

Stop strings are searched for in text that arrives in pieces. The match that is complete first wins; of those
complete at the same character, the longest. So the released text does not depend on how the text is cut into
pieces, and no look-ahead past a match is needed. Each stop string has a Knuth-Morris-Pratt automaton: a
character costs the same for a string of any length.

An answer's ids are cut to its own text, without the stop token or stop string that ended it. Texts that an
answer must not contain become the ids that would write them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.values.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EndOfSequence:
    """`stated` are the ids of generation_config.json, as transformers' generate uses them, or else of
    config.json. The tokenizer's own id ends a generation too, as with vLLM and SGLang: a model tuned for chat
    often has another end than the configuration that it inherited."""

    source: str  # This is the file that states them, or "".
    stated: tuple[int, ...]
    tokenizer: int | None

    @property
    def token_ids(self) -> tuple[int, ...]:
        own = () if self.tokenizer is None or self.tokenizer in self.stated else (self.tokenizer,)
        return (*self.stated, *own)


def find_end_of_sequence(configs: Mapping[str, Mapping[str, Any]], tokenizer: int | None) -> EndOfSequence:
    """Return the ids of the first of `configs`, by file name, that states any. Raises ConfigError where it
    states something other than token ids."""
    for source, config in configs.items():
        text_config = config.get("text_config") or {}  # Multimodal checkpoints have it there.
        if stated := _ids(source, config.get("eos_token_id", text_config.get("eos_token_id"))):
            return EndOfSequence(source, stated, tokenizer)
    return EndOfSequence("", (), tokenizer)


def _ids(source: str, value: Any) -> tuple[int, ...]:
    values = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(each, bool) or not isinstance(each, int) or each < 0 for each in values):
        raise ConfigError(f"eos_token_id of {source} is no token id, nor a list of them: {value!r}")
    return tuple(dict.fromkeys(values))


class StopStrings:
    """This searches one stream of text. With `included` the match is released, too, so that no text is held
    back. Raises ValueError where a stop string is empty."""

    def __init__(self, stop: tuple[str, ...], included: bool = False) -> None:
        if not all(stop):
            raise ValueError("a stop string is empty")
        self._automata = [_Automaton(pattern) for pattern in stop]
        self._included = included
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that cannot begin a stop string any more, and the stop string once one is complete.

        The text from the match on, or behind it where the match is `included`, is dropped, and so is all
        later text.
        """
        if self._matched is not None or not self._automata:
            return ("" if self._matched is not None else text), self._matched
        pending = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            matched = self._step(character)
            if matched is not None:
                self._matched, self._held = matched, ""
                return pending[: end if self._included else end - len(matched)], matched
        held_len = 0 if self._included else max(automaton.matched_len for automaton in self._automata)
        released_len = len(pending) - held_len
        self._held = pending[released_len:]
        return pending[:released_len], None

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str | None:
        complete = [automaton.pattern for automaton in self._automata if automaton.step(character)]
        return max(complete, key=len, default=None)


class _Automaton:
    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched_len = 0
        self._borders = _borders(pattern)

    def step(self, character: str) -> bool:
        while self.matched_len and self.pattern[self.matched_len] != character:
            self.matched_len = self._borders[self.matched_len - 1]
        if self.pattern[self.matched_len] == character:
            self.matched_len += 1
        return self.matched_len == len(self.pattern)


def _borders(pattern: str) -> list[int]:
    """Return for each i the length of the longest proper prefix of pattern[:i + 1] that also ends it."""
    borders = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = borders[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        borders[index] = length
    return borders


_STOP_IDS = 1024  # A stop string has fewer ids.


class TextTokenizer(Protocol):
    def encode(self, text: str, special_tokens: bool = True) -> list[int]: ...

    def text_of(self, token_ids: Sequence[int]) -> str: ...


def without_stop_token(
    ids: Sequence[int], stop_token_ids: Sequence[int], end_ids: Sequence[int]
) -> Sequence[int]:
    """Return the ids without the client's stop token at the end. `end_ids` are the model's own, which stay,
    as they end an answer in every prompt."""
    is_stop = bool(ids) and ids[-1] in stop_token_ids and ids[-1] not in end_ids
    return ids[:-1] if is_stop else ids


def unended(ids: Sequence[int], end_ids: Sequence[int]) -> Sequence[int]:
    return ids[:-1] if ids and ids[-1] in end_ids else ids


def until_stop_string(
    tokenizer: TextTokenizer, ids: Sequence[int], stop_string: str, *, included: bool = False
) -> Sequence[int]:
    """Return the ids up to where the stop string begins or, where it is `included`, ends. A token that it
    cuts is encoded again in part. Return nothing where the text, with special tokens written out, lacks
    the string."""
    ids, last = ids[:-_STOP_IDS], ids[-_STOP_IDS:]
    text = tokenizer.text_of(last)
    begin, kept = _begin(text, stop_string, len(tokenizer.text_of(last[:-1]))), len(last)
    if begin < 0:
        return ()
    end = begin + len(stop_string) if included else begin
    while kept and len(tokenizer.text_of(last[:kept])) > end:
        kept -= 1
    rest = text[len(tokenizer.text_of(last[:kept])) : end]
    return [*ids, *last[:kept], *(tokenizer.encode(rest, special_tokens=False) if rest else ())]


def _begin(text: str, stop_string: str, before_last: int) -> int:
    """Return where the stop string begins: at the first match that the last token completes, of perhaps two.
    Without one, text was held back and came later, so that the last match counts."""
    first = text.find(stop_string, max(0, before_last - len(stop_string) + 1))
    return text.rfind(stop_string) if first < 0 else first


_BLANK = " "

Ids = tuple[int, ...]


def banned_ids(tokenizer: TextTokenizer, words: Iterable[str]) -> tuple[Ids, ...]:
    """Encode each word as at the beginning of a text and as after a blank, like vLLM's bad_words. An encoding
    that ends with a shorter one is left out, as the shorter one bans both."""
    written = dict.fromkeys(ids for word in words for ids in _written(tokenizer, word))
    lengths = {len(ids) for ids in written}  # A word of a thousand ids has too many ends to try all.
    return tuple(ids for ids in written if not any(ids[-n:] in written for n in lengths if n < len(ids)))


def _written(tokenizer: TextTokenizer, word: str) -> Iterator[Ids]:
    bare = word.lstrip(_BLANK) or word
    for text in (bare, _BLANK + bare):
        if ids := tokenizer.encode(text, special_tokens=False):
            yield tuple(ids)
