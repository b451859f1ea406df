"""Texts as ids of a vocabulary, and back."""

from collections.abc import Iterable

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
