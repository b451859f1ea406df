"""Ids become text as they arrive, never half a character. The module is pure, given a decoder.

Where ids are bytes, no decoder is needed: a character's first bytes are held until its last one arrives. Else
the latest ids are in a window that is decoded as a whole:

    window   | context ........ | pending ........ |     The context gives the decoder its left side.
    text     | released ........... | held ....... |     A held U+FFFD may still become a character.

The window is *clean* when its text does not end in U+FFFD: all text is released, and at times the window is
cut at the last clean point. A tail of U+FFFD is held; once more ids are pending than an incomplete character
can have, only as much of the tail is held as an incomplete character can become.

With some tokenizers a text is only the bytes of its ids, read as UTF-8:

    byte level       This is GPT-2's alphabet: Llama 3, Qwen, gpt-oss, DeepSeek.
    byte fallback    This is sentencepiece's: Llama 2, Mistral, Phi-3. Most drop a text's first space.

Bytes that are not UTF-8 become U+FFFD as everywhere: one for each byte that begins nothing, or for the bytes
of an incomplete character. The library replaces each byte of a run of fallbacks if any of the run is wrong,
which cannot be known while the run is still growing; so its own decoder is not used.
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
    """`of_ids[id]` is empty for an id without text. `drops_space` is set if a text loses its first space."""

    of_ids: Sequence[bytes]
    drops_space: bool = False

    def joined(self, token_ids: Iterable[int]) -> bytes:
        of_ids = self.of_ids
        return b"".join(of_ids[token_id] for token_id in token_ids if token_id < len(of_ids))

    def text_of(self, token_ids: Iterable[int]) -> str:
        text = self.joined(token_ids).decode(errors="replace")
        return text.removeprefix(" ") if self.drops_space else text

    def without(self, silent: Iterable[int]) -> "Pieces":
        audible = list(self.of_ids)
        for token_id in silent:
            audible[token_id] = b""
        return replace(self, of_ids=audible)


def pieces_of(tokenizer: Any) -> Pieces | None:
    """Return the bytes of each id of a tokenizers.Tokenizer, including special tokens, or None where its text
    is not just bytes."""
    kind = _kind_of(tokenizer.decoder)
    if kind is None:
        return None
    bytes_of, drops_space = kind
    vocabulary: Mapping[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    of_ids = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        of_ids[token_id] = bytes_of(token)
    pieces = Pieces(of_ids, drops_space)
    # The library decodes fallbacks above ASCII differently when they are in the order of their ids.
    is_text = bytes_of is bytes_of_byte_level
    ids = sorted(i for i in vocabulary.values() if is_text or of_ids[i][:1] < b"\x80" or len(of_ids[i]) > 1)
    return pieces if tokenizer.decode(ids, skip_special_tokens=False) == pieces.text_of(ids) else None


def _kind_of(decoder: Any) -> tuple[Callable[[str], bytes], bool] | None:
    says = json.loads(decoder.__getstate__()) if decoder is not None else {}
    if says.get("type") == "ByteLevel":
        return bytes_of_byte_level, False
    parts = says.get("decoders") or []
    if parts[:3] == _FALLBACK and parts[3:] in ([], [_DROPS_SPACE]):
        return bytes_of_sentencepiece, len(parts) > 3
    return None


_INCOMPLETE = "\ufffd"
# An incomplete character has at most 3 bytes, hence at most 3 ids, and decodes to one U+FFFD or, with byte
# fallback, to one for each byte.
_MAX_INCOMPLETE = 3
# This many ids determine the text's end as well as all ids would: 3 held U+FFFD of up to 3 bytes each, and
# the 3 bytes before them, after which any UTF-8 stream is in step again.
_MIN_WINDOW = 12
# A clean window is cut above this length: cutting costs a second decode.
_CUT_ABOVE = 16
# Any window is cut above this length, but not while a character may become whole: many ids may have arrived
# together, and the cut could break another character.
_MAX_WINDOW = 32


class TokenDecoder(Protocol):
    @property
    def pieces(self) -> Pieces | None:
        """Return the bytes of each id, with none for silent ids, or None where text is not just bytes."""

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Decode ids that are not silent. Bytes that are not UTF-8 become U+FFFD."""

    def audible(self, token_ids: Sequence[int]) -> list[int]:
        """Return the ids without silent ones (special or unknown), which never have text."""


def detokenizer_of(decoder: TokenDecoder) -> "ByteDetokenizer | Detokenizer":
    return Detokenizer(decoder) if decoder.pieces is None else ByteDetokenizer(decoder.pieces)


class ByteDetokenizer:
    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._held = b""
        self._drops_space = pieces.drops_space  # This is true until there is text.

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
    """This makes the text of one stream of ids.

    All pushes and finish together equal `decode(all ids)`, for decoders whose text never changes once it is
    complete (byte-level, sentencepiece without byte fallback, per character), and do not depend on how the
    ids are cut into pushes. A push costs one or two decodes; where it breaks a character or ends within one,
    it costs as many for each id. A decode covers at most _MAX_WINDOW ids and those of this push and the last.
    """

    def __init__(self, tokenizer: TokenDecoder) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._clean_point = 0  # The ids before it are context, and the others are pending.
        self._released = 0  # This counts characters of the decoded window.

    def push(self, token_ids: Sequence[int]) -> str:
        audible = self._tokenizer.audible(token_ids)
        whole = self._push_whole(audible) if len(audible) > 1 else None
        return "".join(map(self._push_one, audible)) if whole is None else whole

    def _push_whole(self, token_ids: list[int]) -> str | None:
        """Return None, without a change, where a character in them is broken or may be incomplete."""
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
