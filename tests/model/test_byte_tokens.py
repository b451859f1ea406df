from router.conftest import byte_backend
from services.model.tokenizer_json import bytes_of_byte_level, bytes_of_piece


def test_every_byte_of_a_byte_level_vocabulary() -> None:
    vocabulary = byte_backend().get_vocab()
    assert {bytes_of_piece(piece) for piece in vocabulary} == {bytes([byte]) for byte in range(256)}
    assert all(bytes_of_piece(piece) == bytes([byte]) for piece, byte in vocabulary.items())


def test_a_token_is_its_bytes(subtests):
    for piece, expected in [
        ("<0xE2>", b"\xe2"),
        ("<0xe2>", b"<0xe2>"),  # small letters: a text
        ("ĠâĤ", b" \xe2\x82"),
        ("ï¿½", "\ufffd".encode()),  # the character itself
        ("▁a", None),
        ("語", None),
    ]:
        with subtests.test("pieces of both families", piece=piece):
            assert bytes_of_piece(piece) == expected
    for token, expected in [
        ("ĠâĤ", b" \xe2\x82"),
        ("<0xE2>", b"<0xE2>"),
        ("a b", b"a b"),
        ("語", "語".encode()),
        ("\xad", b"\xc2\xad"),
    ]:
        with subtests.test("a byte level token is its bytes or its own text", token=token):
            assert bytes_of_byte_level(token) == expected
