import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.text.answer_ends import until_stop_string, without_stop_token

PIECES = ["a", "b", "ab", "bc", "c", "bcbc", "<end>"]


class Pieces:
    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        return [PIECES.index(character) for character in text]

    def text_of(self, token_ids: list[int]) -> str:
        return "".join(PIECES[token_id] for token_id in token_ids)


ids = st.lists(st.integers(0, len(PIECES) - 2), max_size=8)


@given(ids, st.sampled_from(["a", "bc", "abc", "cb"]), st.booleans())
def test_what_is_left_is_the_text_before_the_stop_string_or_with_it(
    generated: list[int], stop: str, included: bool
) -> None:
    text = Pieces().text_of(generated)
    own = list(until_stop_string(Pieces(), generated, stop, included=included))
    before, found, _ = text.rpartition(stop)
    seen = len(Pieces().text_of(generated[:-1]))
    for end in range(seen + 1, len(text) + 1):
        if text[:end].endswith(stop):
            before = text[: end - len(stop)]
            break
    before += stop if included else ""
    assert Pieces().text_of(own) == (before if found else "")
    # All whole tokens of it are those that were generated.
    whole = 0
    while whole < len(generated) and len(Pieces().text_of(generated[: whole + 1])) <= len(before):
        whole += 1
    assert own[:whole] == (generated[:whole] if found else [])


def test_a_long_answer_keeps_its_beginning_and_a_stop_token_of_the_clients_own_goes(
    subtests: pytest.Subtests,
) -> None:
    generated = [0] * 5000 + [4]
    assert list(until_stop_string(Pieces(), generated, "c")) == [0] * 5000

    for generated, kept in [([0, 4], [0]), ([0, 6], [0, 6]), ([0, 5], [0, 5]), ([4, 0], [4, 0]), ([], [])]:
        with subtests.test(generated=generated, kept=kept):
            assert list(without_stop_token(generated, stop_token_ids=(4, 6), end_ids=(6,))) == kept
