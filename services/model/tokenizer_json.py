"""This module reads tokens from a tokenizer.json (github.com/huggingface/tokenizers). It is pure.

A token represents bytes. Two families have tokens that are parts of a character: byte-level BPE writes each
byte as one character of an alphabet of its own (GPT-2's), and byte fallback has a token <0xNN> for each byte.
"""

import re
from collections.abc import Mapping
from typing import Any


def ids_of(tokenizer: Mapping[str, Any]) -> dict[int, str]:
    """Return the token of each id, added ones included.

    It is empty for a later format that differs.
    """
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, Mapping):
        tokens = {int(token_id): str(token) for token, token_id in vocabulary.items()}
    else:  # Unigram has a list of tokens and scores.
        tokens = {token_id: str(entry[0]) for token_id, entry in enumerate(vocabulary)}
    added = tokenizer.get("added_tokens") or ()
    return tokens | {int(entry["id"]): str(entry["content"]) for entry in added}


def first_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> int | None:
    """Return the lowest id whose token differs, or that only one of them has."""
    ours, theirs = ids_of(one), ids_of(other)
    return min((i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i)), default=None)


SPACE = "\u2581"
_FALLBACK = re.compile("<0x([0-9A-F]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Return the alphabet: printable Latin-1 is itself, and U+0100 and so on are the other bytes in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    own = {chr(byte): byte for byte in printable}
    return own | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()
_ELSE = "\uffff"  # This is no byte.
# Characters below U+0100 that are not in the alphabet must not pass as bytes: Latin-1 has no _ELSE.
_TO_BYTES = str.maketrans(
    dict.fromkeys(map(chr, range(0x100)), _ELSE)
    | {character: chr(byte) for character, byte in _ALPHABET.items()}
)


def bytes_of_piece(piece: str) -> bytes | None:
    """Return the bytes of a token of the vocabulary, or None where neither family writes bytes so."""
    if fallback := _FALLBACK.fullmatch(piece):
        return bytes([int(fallback[1], 16)])
    if all(character in _ALPHABET for character in piece):
        return bytes(_ALPHABET[character] for character in piece)
    return None


def bytes_of_sentencepiece(token: str) -> bytes:
    """Return the token's bytes: with byte fallback a space is U+2581, and the rest is text."""
    if fallback := _FALLBACK.fullmatch(token):
        return bytes([int(fallback[1], 16)])
    return token.replace(SPACE, " ").encode()


def bytes_of_byte_level(token: str) -> bytes:
    """Return the bytes of a byte-level vocabulary's token.

    A token that is not written in the alphabet is its own text.
    """
    try:
        return token.translate(_TO_BYTES).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()
