"""Some tokenizers' text is nothing but the bytes of their ids, read as UTF-8; this finds the bytes. Pure.

    byte level       GPT-2's alphabet: Llama 3, Qwen, gpt-oss, DeepSeek and their like
    byte fallback    sentencepiece's; most drop a space at a text's beginning: Llama 2, Mistral, Phi-3

Bytes that are not UTF-8 become U+FFFD as everywhere: one for each byte that begins nothing, or for what could
have become a character. The library makes one of each byte of a whole run of fallbacks if any of it is wrong,
which nobody can know while the run is still being written; so its own decoder is not asked.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.model.byte_tokens import SPACE, bytes_of_byte_level, bytes_of_sentencepiece

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
