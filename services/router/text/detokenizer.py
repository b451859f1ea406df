"""Ids become text while they come, never half a character. Pure, given a decoder.

Where ids are bytes no decoder is needed: a character's first bytes are held until its last one comes. Else
the latest ids are kept in a window and decoded together:

    window   | context ........ | pending ........ |     context: gives the decoder its left side
    text     | released ........... | held ....... |     held: U+FFFD that may yet become a character

The window is *clean* when its text does not end in U+FFFD: all of it is released, and in time the window is
cut at the clean point before. While the text ends in U+FFFD that tail is held; once more ids are pending than
an incomplete character can have, only as much of it is held as an incomplete character can look like.

Some tokenizers' text is nothing but the bytes of their ids, read as UTF-8; this finds the bytes. Pure.

    byte level       GPT-2's alphabet: Llama 3, Qwen, gpt-oss, DeepSeek and their like
    byte fallback    sentencepiece's; most drop a space at a text's beginning: Llama 2, Mistral, Phi-3

Bytes that are not UTF-8 become U+FFFD as everywhere: one for each byte that begins nothing, or for what could
have become a character. The library makes one of each byte of a whole run of fallbacks if any of it is wrong,
which nobody can know while the run is still being written; so its own decoder is not asked.
"""

import json
from codecs import utf_8_decode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from services.model.tokenizer_json import SPACE, bytes_of_byte_level, bytes_of_sentencepiece

_FALLBACK = [
    {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_DROPS_SPACE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


@dataclass(frozen=True, slots=True)
class Pieces:
    """`of_ids[id]` is empty where the id has no text. `drops_space` says that a text loses a space at its
    beginning."""

    of_ids: Sequence[bytes]
    drops_space: bool = False

    def joined(self, token_ids: Iterable[int]) -> bytes:
        """Ids beyond the last have no bytes."""
        of_ids = self.of_ids
        return b"".join(of_ids[token_id] for token_id in token_ids if token_id < len(of_ids))

    def text_of(self, token_ids: Iterable[int]) -> str:
        text = self.joined(token_ids).decode(errors="replace")
        return text.removeprefix(" ") if self.drops_space else text

    def without(self, silent: Iterable[int]) -> "Pieces":
        """Return the same pieces, in which these ids have no bytes."""
        audible = list(self.of_ids)
        for token_id in silent:
            audible[token_id] = b""
        return replace(self, of_ids=audible)


def pieces_of(tokenizer: Any) -> Pieces | None:
    """Return the bytes of each id of a tokenizers.Tokenizer, special tokens' too, or None where its text is
    more."""
    kind = _kind_of(tokenizer.decoder)
    if kind is None:
        return None
    bytes_of, drops_space = kind
    vocabulary: Mapping[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    of_ids = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        of_ids[token_id] = bytes_of(token)
    pieces = Pieces(of_ids, drops_space)
    # The library makes something else of fallbacks above ASCII that stand in the order of their ids.
    is_text = bytes_of is bytes_of_byte_level
    ids = sorted(i for i in vocabulary.values() if is_text or of_ids[i][:1] < b"\x80" or len(of_ids[i]) > 1)
    return pieces if tokenizer.decode(ids, skip_special_tokens=False) == pieces.text_of(ids) else None


def _kind_of(decoder: Any) -> tuple[Callable[[str], bytes], bool] | None:
    """Return what turns a token into bytes, and whether a space at the beginning is dropped."""
    says = json.loads(decoder.__getstate__()) if decoder is not None else {}
    if says.get("type") == "ByteLevel":
        return bytes_of_byte_level, False
    parts = says.get("decoders") or []
    if parts[:3] == _FALLBACK and parts[3:] in ([], [_DROPS_SPACE]):
        return bytes_of_sentencepiece, len(parts) > 3
    return None


_INCOMPLETE = "\ufffd"
# An incomplete character has at most 3 bytes, hence at most 3 ids, and decodes to one U+FFFD or (byte
# fallback) to one for each byte.
_MAX_INCOMPLETE = 3
# So many ids say the same of the text's end as all ids would: 3 held U+FFFD of up to 3 bytes each, and the
# 3 bytes before them after which a UTF-8 stream that was cut anywhere is in step again.
_MIN_WINDOW = 12
# A clean window is cut when it is longer than that: cutting costs a second decode.
_CUT_ABOVE = 16
# Any window is cut when it is longer than that, but not while a character may yet be whole: among the ids
# before it, many of which may have come together, the cut could break another.
_MAX_WINDOW = 32


class TokenDecoder(Protocol):
    @property
    def pieces(self) -> Pieces | None:
        """The bytes of each id, none of silent ones, are known; where this is None text is more than
        bytes."""

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Decode ids that are not silent. Bytes that are not UTF-8 become U+FFFD."""

    def audible(self, token_ids: Sequence[int]) -> list[int]:
        """Leave out silent ids (special, unknown), which have no text wherever they stand."""


def detokenizer_of(decoder: TokenDecoder) -> "ByteDetokenizer | Detokenizer":
    return Detokenizer(decoder) if decoder.pieces is None else ByteDetokenizer(decoder.pieces)


class ByteDetokenizer:
    """This is the text of one stream of ids. Silent ids have no bytes in `pieces`."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._held = b""
        self._drops_space = pieces.drops_space  # this holds as long as there is no text

    def push(self, token_ids: Sequence[int]) -> str:
        data = self._held + self._bytes_of(token_ids)
        text, num_read = utf_8_decode(data, "replace", False)
        self._held = data[num_read:]
        return self._begun(text) if text and self._drops_space else text

    def finish(self) -> str:
        rest, self._held = self._held, b""
        return rest.decode(errors="replace")

    def _bytes_of(self, token_ids: Sequence[int]) -> bytes:
        try:
            return b"".join(map(self._pieces.of_ids.__getitem__, token_ids))
        except IndexError:
            return self._pieces.joined(token_ids)

    def _begun(self, text: str) -> str:
        self._drops_space = False
        return text.removeprefix(" ")


class Detokenizer:
    """This is the text of one stream of ids.

    All pushes and finish put together are `decode(all ids)`, for decoders whose text never changes once it is
    complete (byte-level, sentencepiece without byte fallback, per character), and the same however the ids
    are cut into pushes. A push costs one or two decodes, and where it breaks a character, or ends within one,
    as many for each id: of at most _MAX_WINDOW ids, the push's, and those of the push before.
    """

    def __init__(self, tokenizer: TokenDecoder) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._clean_point = 0  # the ids before it are context, those from it on are pending
        self._released = 0  # these are characters of the decoded window

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the new text that is final, which is empty while a character is incomplete."""
        audible = self._tokenizer.audible(token_ids)
        whole = self._push_whole(audible) if len(audible) > 1 else None
        return "".join(map(self._push_one, audible)) if whole is None else whole

    def _push_whole(self, token_ids: list[int]) -> str | None:
        """Return None, having done nothing, where a character of them is broken or may be incomplete."""
        window = self._window + token_ids
        text = self._tokenizer.text_of(window)
        new_text = text[self._released :]
        if _INCOMPLETE in new_text:
            return None
        self._window, self._released = window, max(self._released, len(text))
        self._cut_at_clean_point()
        return new_text

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._tokenizer.text_of(self._window)
        held = self._held_chars(text)
        new_text = text[self._released : len(text) - held]
        self._released = max(self._released, len(text) - held)
        if held == 0:
            self._cut_at_clean_point()
        elif len(self._window) > _MAX_WINDOW and self._num_pending > _MAX_INCOMPLETE:
            self._cut_anywhere(held)
        return new_text

    def _held_chars(self, text: str) -> int:
        held = len(text) - len(text.rstrip(_INCOMPLETE))
        return held if self._num_pending <= _MAX_INCOMPLETE else min(held, _MAX_INCOMPLETE)

    @property
    def _num_pending(self) -> int:
        return len(self._window) - self._clean_point

    def finish(self) -> str:
        """Return what was held back. Nothing can be pushed after."""
        rest = self._tokenizer.text_of(self._window)[self._released :]
        self._window, self._clean_point, self._released = [], 0, 0
        return rest

    def _cut_at_clean_point(self) -> None:
        if len(self._window) > _CUT_ABOVE:
            context = self._window[self._clean_point :]
            self._window, self._released = context, len(self._tokenizer.text_of(context))
        self._clean_point = len(self._window)

    def _cut_anywhere(self, held: int) -> None:
        self._window = self._window[-_MIN_WINDOW:]
        self._released = max(0, len(self._tokenizer.text_of(self._window)) - held)
        self._clean_point = 0


class SpecialTokens(Protocol):
    @property
    def all_pieces(self) -> Pieces | None:
        """The bytes of each id, special tokens' too, are known; where this is None text is more than
        bytes."""

    @property
    def special_tokens(self) -> Mapping[int, str]: ...

    def is_silent(self, token_id: int) -> bool: ...

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Special tokens are written out."""


class MarkerDecoder:
    """It decodes for a parser: what a client sees, and the special tokens that `is_marker` says are
    markers."""

    def __init__(self, tokenizer: SpecialTokens, is_marker: Callable[[str], bool]) -> None:
        self._tokenizer = tokenizer
        self._shown = frozenset(
            token_id for token_id, text in tokenizer.special_tokens.items() if is_marker(text)
        )
        pieces = tokenizer.all_pieces
        self._pieces = pieces and pieces.without(tokenizer.special_tokens.keys() - self._shown)

    @property
    def pieces(self) -> Pieces | None:
        return self._pieces

    def text_of(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.text_of(token_ids)

    def audible(self, token_ids: Sequence[int]) -> list[int]:
        is_silent, shown = self._tokenizer.is_silent, self._shown
        return [token_id for token_id in token_ids if token_id in shown or not is_silent(token_id)]
