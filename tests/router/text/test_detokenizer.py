from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.text.detokenizer import Detokenizer
from services.router.text.tokenizer import Tokenizer

SILENT = 256


class BytesDecoder:
    """Id i is byte i, and 256 is silent. It counts the ids it is asked to decode."""

    def __init__(self) -> None:
        self.num_decodes = self.num_decoded = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.num_decodes += 1
        self.num_decoded += len(token_ids)
        return bytes(token_id for token_id in token_ids if token_id != SILENT).decode(errors="replace")

    def text_of(self, token_ids: Sequence[int]) -> str:
        assert SILENT not in token_ids
        return self.decode(token_ids)

    def audible(self, token_ids: Sequence[int]) -> list[int]:
        return [token_id for token_id in token_ids if token_id != SILENT]


class PiecesDecoder(BytesDecoder):
    """Id i is the i-th piece of bytes: tokens that begin and end within characters."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        super().__init__()
        self.pieces = pieces

    def decode(self, token_ids: Sequence[int]) -> str:
        self.num_decodes += 1
        return b"".join(self.pieces[token_id] for token_id in token_ids).decode(errors="replace")


def stream(detokenizer: Detokenizer, pushes: Sequence[Sequence[int]]) -> list[str]:
    return [*(detokenizer.push(ids) for ids in pushes), detokenizer.finish()]


def utf8_ids(text: str) -> list[int]:
    return list(text.encode())


# Bytes that often make, break or nearly make characters, besides any.
byte_ids = st.one_of(
    st.sampled_from(
        [0x41, 0x80, 0xBF, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xED, 0xA0, 0xF0, 0x9F, 0x98, 0x80, 0xF8, SILENT]
    ),
    st.integers(0, SILENT),
)
id_streams = st.one_of(
    st.lists(byte_ids, max_size=80),
    st.text(max_size=30).map(utf8_ids),
    st.lists(st.sampled_from([0x80, 0xF0, 0x9F, 0xEF, 0xBF, 0xBD]), max_size=120),
)


@given(id_streams, st.data())
def test_pushes_and_finish_make_the_whole_text(ids: list[int], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    pushes = [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    decoder = BytesDecoder()
    assert "".join(stream(Detokenizer(decoder), pushes)) == decoder.decode(ids)
    assert "".join(stream(Detokenizer(decoder), [[token_id] for token_id in ids])) == decoder.decode(ids)
    together, alone = Detokenizer(BytesDecoder()), Detokenizer(BytesDecoder())
    for part in pushes:  # at each cut as much is told
        assert together.push(part) == "".join(alone.push([token_id]) for token_id in part)


@given(st.text(alphabet="aé語👋\ufffd", min_size=1), st.lists(st.integers(1, 5), min_size=1, max_size=8))
def test_tokens_may_begin_and_end_within_characters(text: str, sizes: list[int]) -> None:
    data, pieces = text.encode(), []
    while data:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(data[:size])
        data = data[size:]
    texts = stream(Detokenizer(PiecesDecoder(pieces)), [[index] for index in range(len(pieces))])
    assert "".join(texts) == text


@given(st.text(alphabet=st.characters(blacklist_characters="\ufffd", blacklist_categories=["Cs"])))
def test_a_character_is_released_with_its_last_byte(text: str) -> None:
    detokenizer = Detokenizer(BytesDecoder())
    for character in text:
        *first, last = utf8_ids(character)
        assert detokenizer.push(first) == ""
        assert detokenizer.push([last]) == character


def test_bytes_that_are_no_text_are_not_held_and_the_work_does_not_grow_with_the_stream(
    subtests: pytest.Subtests,
) -> None:
    for pattern in [b"\x80", b"\xf0\x9f", b"\xe2\x82", b"\xff", b"\xf0\x9f\x98"]:
        with subtests.test(pattern=pattern):
            decoder = BytesDecoder()
            detokenizer = Detokenizer(decoder)
            ids = list(pattern * 500)
            released = "".join(detokenizer.push([token_id]) for token_id in ids)
            whole = decoder.decode(ids)
            assert len(whole) - len(released) <= 3
            assert released + detokenizer.finish() == whole

    for pattern in [b"a", "é".encode(), "👋".encode(), b"\x80", b"\xf0\x9f"]:
        with subtests.test(pattern=pattern):
            decoder = BytesDecoder()
            detokenizer = Detokenizer(decoder)
            ids = list(pattern * 1000)
            for token_id in ids:
                detokenizer.push([token_id])
            assert decoder.num_decoded < 40 * len(ids)


@given(text=st.text(alphabet="ab <|end>é語👋~\n", max_size=60))
def test_real_tokenizers_stream_what_they_decode(
    byte_tokenizer: Tokenizer, character_tokenizer: Tokenizer, text: str
) -> None:
    for tokenizer in (byte_tokenizer, character_tokenizer):
        ids = tokenizer.encode(text)
        pushes = [[token_id] for token_id in ids]
        assert "".join(stream(Detokenizer(tokenizer), pushes)) == tokenizer.decode(ids)


@given(text=st.text(alphabet="ab  cé語👋", max_size=60), data=st.data())
def test_sentencepiece_keeps_spaces_and_bytes_that_fall_back(
    sentencepiece_tokenizer: Tokenizer, text: str, data: st.DataObject
) -> None:
    ids = sentencepiece_tokenizer.encode(text)
    pushes = [[token_id] for token_id in ids]
    whole = sentencepiece_tokenizer.decode(ids)
    assert "".join(stream(Detokenizer(sentencepiece_tokenizer), pushes)) == whole
    assert "".join(stream(Detokenizer(sentencepiece_tokenizer), [ids])) == whole
    cut = data.draw(st.integers(0, len(ids)))  # within a run of bytes, or between two
    assert "".join(stream(Detokenizer(sentencepiece_tokenizer), [ids[:cut], ids[cut:]])) == whole
    assert whole.lstrip(" ") == text.lstrip(" ")


def test_a_character_that_breaks_behind_many_ids_breaks_none_of_theirs(
    sentencepiece_tokenizer: Tokenizer,
) -> None:
    """The run of bytes is cut everywhere."""
    text = "語" * 20
    ids = sentencepiece_tokenizer.encode(text)
    for cut in range(len(ids)):
        pushes = [ids[:cut], *([token_id] for token_id in ids[cut:])]
        assert "".join(stream(Detokenizer(sentencepiece_tokenizer), pushes)) == text


def test_ids_that_come_together_are_decoded_together() -> None:
    decoder = BytesDecoder()
    detokenizer = Detokenizer(decoder)
    for _ in range(100):
        assert detokenizer.push(utf8_ids("eight él")) == "eight él"
    assert decoder.num_decodes <= 200

    ids = [*utf8_ids("a"), *[SILENT] * 100, 0xC3, *[SILENT] * 100, 0xA9]
    assert stream(Detokenizer(BytesDecoder()), [ids]) == ["aé", ""]

    detokenizer = Detokenizer(BytesDecoder())
    assert detokenizer.push([*utf8_ids("ab"), 0xE2, 0x82]) == "ab"
    assert detokenizer.finish() == "\ufffd"
