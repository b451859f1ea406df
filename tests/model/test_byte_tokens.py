import pytest

from router.conftest import byte_backend
from services.model.byte_tokens import bytes_of_byte_level, bytes_of_piece


def test_every_byte_of_a_byte_level_vocabulary() -> None:
    vocabulary = byte_backend().get_vocab()
    assert {bytes_of_piece(piece) for piece in vocabulary} == {bytes([byte]) for byte in range(256)}
    assert all(bytes_of_piece(piece) == bytes([byte]) for piece, byte in vocabulary.items())


@pytest.mark.parametrize(
    ("piece", "expected"),
    [
        ("<0xE2>", b"\xe2"),
        ("<0xe2>", b"<0xe2>"),  # small letters: a text
        ("ĠâĤ", b" \xe2\x82"),
        ("ï¿½", "\ufffd".encode()),  # the character itself
        ("▁a", None),
        ("語", None),
    ],
)
def test_pieces_of_both_families(piece: str, expected: bytes | None) -> None:
    assert bytes_of_piece(piece) == expected


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("ĠâĤ", b" \xe2\x82"),
        ("<0xE2>", b"<0xE2>"),
        ("a b", b"a b"),
        ("語", "語".encode()),
        ("\xad", b"\xc2\xad"),
    ],
)
def test_a_byte_level_token_is_its_bytes_or_its_own_text(token: str, expected: bytes) -> None:
    assert bytes_of_byte_level(token) == expected
