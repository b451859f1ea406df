"""A chunk that is filled in is the chunk that it would have been."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.backend import FakeBackend, chat, complete, events, finished, response
from services.router.dialects.choice_formats import ChatFormat, CompletionFormat
from services.router.dialects.dialect import json_text
from services.router.dialects.openai_answer import TextChunk

texts = st.text(st.characters(exclude_categories=["Cs"]))


@given(texts, texts)
def test_it_is_what_json_makes_of_it(text: str, model: str) -> None:
    def chunk(text: str) -> dict[str, Any]:
        return {"model": model, "choices": [{"index": 0, "text": text}], "usage": None}

    assert TextChunk(chunk).filled(text) == json_text(chunk(text))


async def test_the_chunks_of_a_stream_are_alike_but_for_their_text(
    subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ask, kind in [(chat, ChatFormat), (complete, CompletionFormat)]:
        with subtests.test(ask=ask):
            made: list[str] = []

            def noted(self: Any, piece: Any, make: Any = kind.delta, made: list[str] = made) -> Any:
                made.append(piece.text)
                return make(self, piece)

            monkeypatch.setattr(kind, "delta", noted)
            backend = FakeBackend(*(response(text) for text in ("a", '"b\n', "语", "d")), finished("e"))
            *chunks, last, _ = events(await ask(backend, stream=True))
            said = [choice.get("text", choice.get("delta", {}).get("content")) for choice in _choices(chunks)]
            assert "".join(said) == 'a"b\n语d' and last["choices"][0]["finish_reason"] == "stop"
            told = [{**chunk, "choices": []} for chunk in chunks]
            assert told == [told[0]] * len(told)
            assert [sorted(choice) for choice in _choices(chunks)] == [sorted(_choices(chunks)[0])] * len(
                chunks
            )
            assert [text for text in made if "\0" not in text] == ["a", "e"]  # the first, and the last


async def test_what_is_told_beside_the_text_is_told_with_each(subtests: pytest.Subtests) -> None:
    with subtests.test("ids of tokens are told with each"):
        backend = FakeBackend(response("a", [1]), response("b", [2]), finished("c", [3]))
        *chunks, _ = events(await complete(backend, stream=True, return_token_ids=True))
        assert [choice["token_ids"] for choice in _choices(chunks)] == [[1], [2], [3]]
    with subtests.test("reasoning is told with each"):
        thinking = response("b")
        thinking.reasoning = "hm"
        backend = FakeBackend(response("a"), thinking, response("c"), finished())
        *chunks, _ = events(await chat(backend, stream=True))
        deltas = [choice["delta"] for choice in _choices(chunks)]
        assert [delta.get("reasoning") for delta in deltas] == [None, None, "hm", None, None]
        assert [delta.get("content") for delta in deltas] == ["", "a", "b", "c", None]


def _choices(chunks: list[Any]) -> list[Any]:
    return [chunk["choices"][0] for chunk in chunks]
