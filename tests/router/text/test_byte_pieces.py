"""Ids that are bytes have the text that the tokenizer decodes, however they come."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as BackendTokenizer

from router.conftest import byte_backend, character_backend
from router.text.test_detokenizer import id_streams, utf8_ids
from services.router.text.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    Pieces,
    detokenizer_of,
    pieces_of,
)
from services.router.text.tokenizer import MarkerDecoder, Tokenizer

BEYOND = 1_000_000  # no tokenizer has it


def told(detokenizer: ByteDetokenizer | Detokenizer, pushes: Sequence[Sequence[int]]) -> str:
    return "".join([*(detokenizer.push(ids) for ids in pushes), detokenizer.finish()])


@given(ids=id_streams, data=st.data())
def test_pushes_and_finish_are_what_the_tokenizer_decodes(
    byte_tokenizer: Tokenizer, ids: list[int], data: st.DataObject
) -> None:
    """Ids of `id_streams` are bytes, and 256 is a special token here too."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    pushes = [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert told(detokenizer_of(byte_tokenizer), pushes) == byte_tokenizer.decode(ids)
    assert told(Detokenizer(byte_tokenizer), pushes) == byte_tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, 300), max_size=40), data=st.data())
def test_any_ids_of_byte_fallback_are_one_text_however_they_come(
    sentencepiece_tokenizer: Tokenizer, ids: list[int], data: st.DataObject
) -> None:
    """Most runs of bytes in them are no UTF-8. Ids from 292 on are special tokens, or none."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    pushes = [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    whole = sentencepiece_tokenizer.decode(ids)
    assert isinstance(detokenizer_of(sentencepiece_tokenizer), ByteDetokenizer)
    assert told(detokenizer_of(sentencepiece_tokenizer), pushes) == whole
    library = sentencepiece_tokenizer._backend.backend_tokenizer
    shown = sentencepiece_tokenizer.audible(ids)
    if "\ufffd" not in whole:
        assert whole == library.decode(shown, skip_special_tokens=False)


def test_what_was_right_before_a_wrong_byte_stays(sentencepiece_tokenizer: Tokenizer) -> None:
    """The library makes one U+FFFD of each byte of the run; half of it may have been streamed by then."""
    ids = [byte + 1 for byte in "é".encode() + b"\xe8\xaa" + b"\xff"]  # id 0 is <unk>
    library = sentencepiece_tokenizer._backend.backend_tokenizer
    assert library.decode(ids) == 5 * "\ufffd"
    assert sentencepiece_tokenizer.decode(ids) == "é\ufffd\ufffd"
    detokenizer = detokenizer_of(sentencepiece_tokenizer)
    assert [detokenizer.push([token_id]) for token_id in ids] == ["", "é", "", "", "\ufffd\ufffd"]


@given(st.text(alphabet=st.characters(blacklist_characters="\ufffd", blacklist_categories=["Cs"])))
def test_a_character_is_released_with_its_last_byte(byte_tokenizer: Tokenizer, text: str) -> None:
    detokenizer = detokenizer_of(byte_tokenizer)
    assert isinstance(detokenizer, ByteDetokenizer)
    for character in text:
        *first, last = utf8_ids(character)
        assert detokenizer.push(first) == ""
        assert detokenizer.push([last]) == character
    assert detokenizer.finish() == ""


def test_ids_that_the_tokenizer_lacks_have_no_text_and_markers_have_it_for_a_parser(
    byte_tokenizer: Tokenizer,
) -> None:
    first, *rest = utf8_ids("é")
    detokenizer = detokenizer_of(byte_tokenizer)
    assert [detokenizer.push(ids) for ids in ([first, BEYOND], [BEYOND], [*rest, BEYOND])] == ["", "", "é"]

    ids = byte_tokenizer.encode("<|end|>a<|tool|>é")
    decoder = MarkerDecoder(byte_tokenizer, "<|tool|>".__eq__)
    assert told(detokenizer_of(decoder), [ids]) == "a<|tool|>é"
    assert told(detokenizer_of(byte_tokenizer), [ids]) == "aé"


def test_what_is_not_bytes_has_no_pieces(subtests: pytest.Subtests) -> None:
    assert pieces_of(character_backend()) is None
    assert pieces_of(BackendTokenizer(models.BPE())) is None

    backend = byte_backend()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip("a", 1, 0)])
    assert pieces_of(backend) is None

    # A token that was added to a vocabulary with a gap has another's id, and a vocabulary has no order.
    ids = {"a": 0, "b": 2, "X": 2}

    class Backend:
        decoder = decoders.ByteLevel()

        def __init__(self, names: str) -> None:
            self.names = names

        def get_vocab(self, with_added_tokens: bool) -> dict[str, int]:
            return {name: ids[name] for name in self.names}

        def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
            return "".join("aX"[token_id > 0] for token_id in token_ids)

    for names, pieces in (("abX", Pieces([b"a", b"", b"X"])), ("aXb", None)):
        with subtests.test(names):
            assert pieces_of(Backend(names)) == pieces


def test_pieces_are_bytes_and_what_is_not_written_in_the_alphabet_is_its_own_text() -> None:
    """The library takes a token that was added for bytes where all of it could be."""
    backend = byte_backend()
    backend.add_tokens([AddedToken(text) for text in ("a b", "<｜x▁y｜>", "éé", "\x7f\x80", "語")])
    pieces = pieces_of(backend)
    assert pieces is not None and pieces.of_ids[256:] == [
        b"a b",
        "<｜x▁y｜>".encode(),
        b"\xe9\xe9",
        b"\x7f\xc2\x80",
        "語".encode(),
    ]
    for ids in ([0x41, 256, 257, 0x42], [258, 0xA9], [0xC3, 258], [259, 260]):
        assert told(ByteDetokenizer(pieces), [ids]) == backend.decode(ids, skip_special_tokens=False)

    backend = BackendTokenizer(models.BPE({"a": 0, "Ġb": 7}, []))
    backend.decoder = decoders.ByteLevel()
    pieces = pieces_of(backend)
    assert pieces is not None and told(ByteDetokenizer(pieces), [[0], [3, 7]]) == "a b"
