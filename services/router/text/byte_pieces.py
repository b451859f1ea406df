"""The bytes of each id, of tokenizers whose text is nothing but these bytes, read as UTF-8. Pure.

Those are the byte-level ones (GPT-2's alphabet: Llama 3, Qwen, gpt-oss, DeepSeek and their like).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import decoders

from services.model.byte_tokens import bytes_of_byte_level


def pieces_of(tokenizer: Any) -> list[bytes] | None:
    """By id, special tokens' too; empty where the tokenizer lacks the id. `tokenizer` is a
    tokenizers.Tokenizer. None: its text is something else."""
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        return None
    vocabulary: Mapping[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        pieces[token_id] = bytes_of_byte_level(token)
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


def _joined(pieces: Sequence[bytes], ids: Sequence[int]) -> str:
    return b"".join(map(pieces.__getitem__, ids)).decode(errors="replace")
