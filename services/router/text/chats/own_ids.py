"""An answer's ids are cut to what it said: without what ended it and was not its own. Pure."""

from collections.abc import Sequence
from typing import Protocol

_STOP_IDS = 1024  # a stop string has fewer


class TextTokenizer(Protocol):
    def encode(self, text: str, special_tokens: bool = True) -> list[int]: ...

    def text_of(self, token_ids: Sequence[int]) -> str: ...


def without_stop_token(
    ids: Sequence[int], stop_token_ids: Sequence[int], end_ids: Sequence[int]
) -> Sequence[int]:
    """`stop_token_ids` are the client's, `end_ids` the model's: these end an answer in every prompt."""
    is_stop = bool(ids) and ids[-1] in stop_token_ids and ids[-1] not in end_ids
    return ids[:-1] if is_stop else ids


def unended(ids: Sequence[int], end_ids: Sequence[int]) -> Sequence[int]:
    return ids[:-1] if ids and ids[-1] in end_ids else ids


def until_stop_string(
    tokenizer: TextTokenizer, ids: Sequence[int], stop_string: str, *, included: bool = False
) -> Sequence[int]:
    """Return the ids up to where the stop string begins or, where it is `included`, ends. Where that is
    within a token, its part of the text is encoded anew. Nothing is returned where the string is not in the
    text, with special tokens written out."""
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
    """Return where the string begins that ended the answer: the first that the last token completes, which
    may be two. Text that was held back comes later, and the string then is the last."""
    first = text.find(stop_string, max(0, before_last - len(stop_string) + 1))
    return text.rfind(stop_string) if first < 0 else first
