import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.router.text.answer_ends import StopStrings


def oracle(stop: tuple[str, ...], text: str) -> tuple[str, str | None]:
    """Read the whole text, up to the first end where a stop string is complete: the longest one there."""
    for end in range(len(text) + 1):
        complete = [string for string in stop if text[:end].endswith(string)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def held_back(stop: tuple[str, ...], text: str) -> int:
    """Return the length of the longest suffix of the text that a stop string can begin with."""
    lengths = [n for string in stop for n in range(1, len(string)) if text.endswith(string[:n])]
    return max(lengths, default=0)


stops = st.lists(st.text(alphabet="abc", min_size=1, max_size=6), max_size=4).map(tuple)
pieces = st.lists(st.text(alphabet="abc", max_size=5), max_size=12)


@given(stops, pieces)
@example(("abcd", "bc"), ["ab", "cd"])
@example(("bc", "abc"), ["a", "b", "c"])
@example(("aabaac",), ["aabaa", "baac"])
def test_any_pieces_give_what_the_whole_text_gives(stop: tuple[str, ...], pushed: list[str]) -> None:
    strings = StopStrings(stop)
    whole, released, matched = "", "", None
    for piece in pushed:
        whole += piece
        text, matched = strings.push(piece)
        released += text
        # No more is held back than may become a stop string.
        assert matched is not None or released == whole[: len(whole) - held_back(stop, whole)]
    released += strings.finish()
    assert (released, matched) == oracle(stop, whole)


@given(stops, pieces)
def test_what_is_found_is_released_at_once_where_it_is_included(
    stop: tuple[str, ...], pushed: list[str]
) -> None:
    strings, whole, released = StopStrings(stop, included=True), "", ""
    for piece in pushed:
        whole += piece
        text, matched = strings.push(piece)
        released += text
        before, expected = oracle(stop, whole)
        assert (released, matched) == (before + (expected or ""), expected)
    assert strings.finish() == ""


def test_nothing_is_released_after_a_match_and_without_stop_strings_text_passes() -> None:
    strings = StopStrings(("\n\n",))
    assert strings.push("one\n") == ("one", None)
    assert strings.push("\ntwo") == ("", "\n\n")
    assert strings.push("three") == ("", "\n\n")
    assert strings.finish() == ""

    strings = StopStrings(())
    assert strings.push("any") == ("any", None)
    assert strings.finish() == ""

    with pytest.raises(ValueError, match="empty"):
        StopStrings(("a", ""))
