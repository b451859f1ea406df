from hypothesis import given
from hypothesis import strategies as st

from services.router.text.answer_ends import banned_ids


class PieceTokenizer:
    """Known pieces are one id each, the longest first; all else is a character."""

    def __init__(self, *pieces: str) -> None:
        self._pieces = sorted(pieces, key=len, reverse=True)

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        ids = [0] if special_tokens else []
        while text:
            piece = next((p for p in self._pieces if text.startswith(p)), text[0])
            ids.append(1000 + self._pieces.index(piece) if len(piece) > 1 else ord(piece))
            text = text[len(piece) :]
        return ids


@given(st.lists(st.text("ab", min_size=1, max_size=5), max_size=6))
def test_none_that_is_left_ends_with_another_and_each_ends_with_one_that_is(words):
    banned = banned_ids(PieceTokenizer(" a", "ba"), words)
    assert not [1 for one in banned for other in banned if one != other and one[-len(other) :] == other]
    for word in words:
        for text in (word, f" {word}"):
            ids = tuple(PieceTokenizer(" a", "ba").encode(text, special_tokens=False))
            assert any(ids[-len(one) :] == one for one in banned)


def test_a_word_is_banned_at_the_beginning_and_behind_a_blank():
    tokenizer = PieceTokenizer(" cat", "ca")
    assert banned_ids(tokenizer, ["cat"]) == ((1001, ord("t")), (1000,))
    assert banned_ids(tokenizer, [" cat"]) == banned_ids(tokenizer, ["cat"])

    assert banned_ids(PieceTokenizer(), ["cat"]) == (tuple(b"cat"),)
    assert banned_ids(PieceTokenizer(), ["cat", "at", "t", "t"]) == ((ord("t"),),)

    assert banned_ids(PieceTokenizer(), [" "]) == ((32,),)


def test_no_special_token_is_banned(sentencepiece_tokenizer):
    (first, second) = banned_ids(sentencepiece_tokenizer, ["a"]), banned_ids(sentencepiece_tokenizer, ["ab"])
    assert first and all(sentencepiece_tokenizer.text_of(ids).strip() == "a" for ids in first)
    assert second and all(sentencepiece_tokenizer.text_of(ids).strip() == "ab" for ids in second)
