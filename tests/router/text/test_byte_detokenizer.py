"""The text of ids that are bytes: as the tokenizer decodes them, however they come."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as BackendTokenizer

from router.conftest import byte_backend, character_backend, sentencepiece_backend
from router.text.test_detokenizer import id_streams, utf8_ids
from services.router.text.byte_detokenizer import ByteDetokenizer
from services.router.text.byte_pieces import pieces_of, without
from services.router.text.detokenizer import Detokenizer, detokenizer_of
from services.router.text.marker_decoder import MarkerDecoder
from services.router.text.tokenizer import Tokenizer

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


@given(st.text(alphabet=st.characters(blacklist_characters="\ufffd", blacklist_categories=["Cs"])))
def test_a_character_is_released_with_its_last_byte(byte_tokenizer: Tokenizer, text: str) -> None:
    detokenizer = detokenizer_of(byte_tokenizer)
    assert isinstance(detokenizer, ByteDetokenizer)
    for character in text:
        *first, last = utf8_ids(character)
        assert detokenizer.push(first) == ""
        assert detokenizer.push([last]) == character
    assert detokenizer.finish() == ""


def test_ids_that_the_tokenizer_lacks_have_no_text(byte_tokenizer: Tokenizer) -> None:
    first, *rest = utf8_ids("é")
    detokenizer = detokenizer_of(byte_tokenizer)
    assert [detokenizer.push(ids) for ids in ([first, BEYOND], [BEYOND], [*rest, BEYOND])] == ["", "", "é"]


def test_a_marker_is_text_to_the_parser_it_is_shown_to(byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode("<|end|>a<|tool|>é")
    decoder = MarkerDecoder(byte_tokenizer, "<|tool|>".__eq__)
    assert told(detokenizer_of(decoder), [ids]) == "a<|tool|>é"
    assert told(detokenizer_of(byte_tokenizer), [ids]) == "aé"
    assert without(None, ()) is None


def test_a_token_that_is_not_written_in_the_alphabet_is_its_own_text() -> None:
    """As the library has it: a token that was added is taken for bytes where all of it could be."""
    backend = byte_backend()
    backend.add_tokens([AddedToken(text) for text in ("a b", "<｜x▁y｜>", "éé", "\x7f\x80", "語")])
    pieces = pieces_of(backend)
    assert pieces is not None and pieces[256:] == [
        b"a b",
        "<｜x▁y｜>".encode(),
        b"\xe9\xe9",
        b"\x7f\xc2\x80",
        "語".encode(),
    ]
    for ids in ([0x41, 256, 257, 0x42], [258, 0xA9], [0xC3, 258], [259, 260]):
        assert told(ByteDetokenizer(pieces), [ids]) == backend.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("backend", [character_backend(), sentencepiece_backend()])
def test_a_tokenizer_that_is_not_byte_level_has_no_pieces(backend: BackendTokenizer) -> None:
    assert pieces_of(backend) is None


def test_a_decoder_that_does_more_has_no_pieces() -> None:
    backend = byte_backend()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip("a", 1, 0)])
    assert pieces_of(backend) is None


@pytest.mark.parametrize(("names", "pieces"), [("abX", [b"a", b"", b"X"]), ("aXb", None)])
def test_a_table_that_says_else_than_the_library_is_not_used(names: str, pieces: list[bytes] | None) -> None:
    """A token that was added to a vocabulary with a gap has another's id, and a vocabulary has no order."""
    ids = {"a": 0, "b": 2, "X": 2}

    class Backend:
        decoder = decoders.ByteLevel()

        def get_vocab(self, with_added_tokens: bool) -> dict[str, int]:
            return {name: ids[name] for name in names}

        def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
            return "".join("aX"[token_id > 0] for token_id in token_ids)

    assert pieces_of(Backend()) == pieces


def test_ids_may_have_gaps() -> None:
    backend = BackendTokenizer(models.BPE({"a": 0, "Ġb": 7}, []))
    backend.decoder = decoders.ByteLevel()
    pieces = pieces_of(backend)
    assert pieces is not None and told(ByteDetokenizer(pieces), [[0], [3, 7]]) == "a b"
