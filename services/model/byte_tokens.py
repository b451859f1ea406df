"""The bytes that a token of a vocabulary stands for. Pure.

Two families have tokens that are parts of a character: byte-level BPE writes each byte as one character of an
alphabet of its own (GPT-2's), and byte fallback has a token <0xNN> for each byte.
"""

import re

_FALLBACK = re.compile("<0x([0-9A-F]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Printable Latin-1 stands for itself; the other bytes, in their order, for U+0100 and what follows."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    own = {chr(byte): byte for byte in printable}
    return own | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_LEVEL_ALPHABET = _byte_level_alphabet()


def bytes_of_piece(piece: str) -> bytes | None:
    """`piece` is the token as the vocabulary has it. None: neither family writes bytes so."""
    if fallback := _FALLBACK.fullmatch(piece):
        return bytes([int(fallback[1], 16)])
    if all(character in BYTE_LEVEL_ALPHABET for character in piece):
        return bytes(BYTE_LEVEL_ALPHABET[character] for character in piece)
    return None
