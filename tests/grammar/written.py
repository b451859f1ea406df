"""Texts as ids of a vocabulary, and back."""

import json
from collections.abc import Iterable
from pathlib import Path

from router.conftest import byte_backend
from services.grammar.vocabulary import Vocabulary


def ids_of_text(vocabulary: Vocabulary, text: str) -> list[int]:
    """One id for each byte, or for each character where the vocabulary has none for bytes."""
    of_piece = {p: i for i, p in reversed(list(enumerate(vocabulary.pieces))) if i not in vocabulary.special}
    if all(bytes([octet]) in of_piece for octet in text.encode()):
        return [of_piece[bytes([octet])] for octet in text.encode()]
    return [of_piece[character.encode()] for character in text]


def text_of(vocabulary: Vocabulary, token_ids: Iterable[int]) -> str:
    """Raises UnicodeDecodeError where that is no text, AssertionError for a special token."""
    token_ids = list(token_ids)
    assert not vocabulary.special.intersection(token_ids)
    return b"".join(vocabulary.pieces[token_id] for token_id in token_ids).decode()


def write_tokenizer(directory: Path, *longer: str) -> int:
    """A byte-level tokenizer.json: id i is byte i, then an end, another special token, and `longer` tokens of
    ASCII. Returns how many ids there are."""
    vocab = byte_backend().get_vocab() | {token: 258 + index for index, token in enumerate(longer)}
    special = [
        {"id": 256, "content": "<end>", "special": True},
        {"id": 257, "content": "<a>", "special": True},
    ]
    tokenizer = {"model": {"vocab": vocab}, "decoder": {"type": "ByteLevel"}, "added_tokens": special}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return 258 + len(longer)
