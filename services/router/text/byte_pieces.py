"""The bytes of each id, of tokenizers whose text is nothing but these bytes, read as UTF-8. Pure.

Those are the byte-level ones (GPT-2's alphabet: Llama 3, Qwen, gpt-oss, DeepSeek and their like).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import decoders

from services.model.byte_tokens import BYTE_LEVEL_ALPHABET

_ELSE = "\uffff"  # no byte
# Characters below U+0100 that are not in the alphabet must not pass as bytes: Latin-1 has no _ELSE.
_TO_BYTES = str.maketrans(
    dict.fromkeys(map(chr, range(0x100)), _ELSE)
    | {character: chr(byte) for character, byte in BYTE_LEVEL_ALPHABET.items()}
)


def pieces_of(tokenizer: Any) -> list[bytes] | None:
    """By id, special tokens' too; empty where the tokenizer lacks the id. `tokenizer` is a
    tokenizers.Tokenizer. None: its text is something else."""
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        return None
    vocabulary: Mapping[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        pieces[token_id] = _bytes_of(token)
    ids = sorted(vocabulary.values())
    is_so = tokenizer.decode(ids, skip_special_tokens=False) == _joined(pieces, ids)
    return pieces if is_so else None


def without(pieces: Sequence[bytes] | None, silent: Iterable[int]) -> list[bytes] | None:
    """These ids have none."""
    if pieces is None:
        return None
    heard = list(pieces)
    for token_id in silent:
        heard[token_id] = b""
    return heard


def _bytes_of(token: str) -> bytes:
    """A token that is not written in the alphabet is its own text."""
    try:
        return token.translate(_TO_BYTES).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def _joined(pieces: Sequence[bytes], ids: Sequence[int]) -> str:
    return b"".join(map(pieces.__getitem__, ids)).decode(errors="replace")
