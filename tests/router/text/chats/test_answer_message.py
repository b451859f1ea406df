import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.text.answer_message import (
    AnswerCall,
    as_object,
    canonical_json,
    digest,
    message_digest,
)

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def said_of(arguments: str, content: str = "", name: str = "f", id_: str = "1") -> bytes:
    return message_digest(content, [AnswerCall(id_, name, arguments)])


@given(st.dictionaries(st.text(max_size=5), values, max_size=4))
def test_what_clients_do_to_json_changes_nothing(arguments: dict[str, object]) -> None:
    turned = dict(reversed(arguments.items()))
    forms = [
        json.dumps(arguments),
        json.dumps(turned, ensure_ascii=False),
        json.dumps(arguments, separators=(",", ":")),
        json.dumps(turned, indent=2),
    ]
    assert len({said_of(form) for form in forms}) == 1


BROKEN = {
    '{"a": "x': {"a": "x"},
    '{"a": "x\\': {"a": "x"},
    '{"a": "x\\u00e': {"a": "x"},
    '{"a": "x\\\\': {"a": "x\\"},
    '{"a": "{[,': {"a": "{[,"},
    '{"a': {},
    '{"a": 1, "b"': {"a": 1},
    '{"a": 1, "b": tr': {"a": 1},
    '{"a": [1, {"b": "c"},': {"a": [1, {"b": "c"}]},
    '"{\\"a\\": 1}"': {"a": 1},
    '"{\\"a\\": \\"x"': {"a": "x"},
    " ": {},
    **{text: {"INVALID_JSON": text} for text in ("a = 1", "[1]", "5", '{"a": 1}}', "{a: 1", "[" * 5000)},
}


def test_arguments_are_an_object_whatever_the_model_wrote(subtests: pytest.Subtests) -> None:
    for text, value in BROKEN.items():
        with subtests.test(text=text[:30]):
            assert json.loads(as_object(text)) == value
    kept = '{"a" : 1.50}'
    assert as_object(kept) == kept


@given(st.dictionaries(st.text(max_size=5), values, max_size=4), st.data())
def test_arguments_that_broke_off_anywhere_keep_what_was_whole(arguments: Any, data: st.DataObject) -> None:
    text = json.dumps(arguments)
    kept = json.loads(as_object(text[: data.draw(st.integers(1, len(text)))]))
    whole = dict(list(arguments.items())[: max(len(kept) - 1, 0)])  # The last one may be a part.
    assert kept.items() >= whole.items() if whole else isinstance(kept, dict)
    assert list(kept) == list(arguments)[: len(kept)]


def test_closing_takes_time_in_proportion() -> None:
    """A million of anything takes a tenth of a second, and the square of it would take hours."""
    for long in ("[", '{"a":', '"x",', "\\", '\\"', " ", "x"):
        for begin, end in (("{", ""), ("{", "x:"), ('{"a": "', ""), ('{"a"', "x:"), ("{,", "x:")):
            as_object(begin + long * 100_000 + end)


@given(values, values)
def test_values_that_differ_stay_apart(first: object, second: object) -> None:
    is_same = canonical_json(json.dumps(first)) == canonical_json(json.dumps(second))
    assert is_same == (json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True))


def test_what_is_said_counts_and_ids_do_not(subtests: pytest.Subtests) -> None:
    assert said_of('{"a": 1.0}') == said_of('{"a": 1}') != said_of('{"a": 1.5}')
    assert said_of("") == said_of("{}")

    for broken in ["{", '{"a": ', "[" * 5000, "9" * 5000, "\ud800"]:
        with subtests.test(broken=broken):
            assert said_of(broken) == said_of(broken) != said_of(broken + " ")

    assert said_of("{}") == said_of("{}", id_="2") == said_of("{}", content=" \n")
    assert (
        len({said_of("{}"), said_of("{}", name="g"), said_of("{}", content="a"), message_digest("", [])}) == 4
    )
    twice = [AnswerCall("1", "f", "{}"), AnswerCall("2", "g", "{}")]
    assert message_digest("", twice) != message_digest("", twice[::-1])

    assert len({digest("ab", "c"), digest("a", "bc"), digest("abc"), digest("ab", b"c", "")}) == 4
