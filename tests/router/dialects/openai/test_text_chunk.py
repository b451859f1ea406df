"""A chunk that is filled in is the chunk that it would have been."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.backend import FakeBackend, chat, complete, events, finished, response
from services.router.dialects.answer import json_text
from services.router.dialects.openai.chat.format import ChatFormat
from services.router.dialects.openai.completion_format import CompletionFormat
from services.router.dialects.openai.text_chunk import TextChunk

texts = st.text(st.characters(exclude_categories=["Cs"]))


@given(texts, texts)
def test_it_is_what_json_makes_of_it(text: str, model: str) -> None:
    def chunk(text: str) -> dict[str, Any]:
        return {"model": model, "choices": [{"index": 0, "text": text}], "usage": None}

    assert TextChunk(chunk).filled(text) == json_text(chunk(text))


@pytest.mark.parametrize(("ask", "kind"), [(chat, ChatFormat), (complete, CompletionFormat)])
async def test_the_chunks_of_a_stream_are_alike_but_for_their_text(
    monkeypatch: pytest.MonkeyPatch, ask: Any, kind: Any
) -> None:
    made, make = [], kind.delta
    monkeypatch.setattr(kind, "delta", lambda self, piece: made.append(piece.text) or make(self, piece))
    backend = FakeBackend(*(response(text) for text in ("a", '"b\n', "语", "d")), finished("e"))
    *chunks, last, _ = events(await ask(backend, stream=True))
    said = [choice.get("text", choice.get("delta", {}).get("content")) for choice in _choices(chunks)]
    assert "".join(said) == 'a"b\n语d' and last["choices"][0]["finish_reason"] == "stop"
    told = [{**chunk, "choices": []} for chunk in chunks]
    assert told == [told[0]] * len(told)
    assert [sorted(choice) for choice in _choices(chunks)] == [sorted(_choices(chunks)[0])] * len(chunks)
    assert [text for text in made if "\0" not in text] == ["a", "e"]  # the first, and the last


async def test_ids_of_tokens_are_told_with_each() -> None:
    backend = FakeBackend(response("a", [1]), response("b", [2]), finished("c", [3]))
    *chunks, _ = events(await complete(backend, stream=True, return_token_ids=True))
    assert [choice["token_ids"] for choice in _choices(chunks)] == [[1], [2], [3]]


async def test_reasoning_is_told_with_each() -> None:
    thinking = response("b")
    thinking.reasoning = "hm"
    backend = FakeBackend(response("a"), thinking, response("c"), finished())
    *chunks, _ = events(await chat(backend, stream=True))
    deltas = [choice["delta"] for choice in _choices(chunks)]
    assert [delta.get("reasoning") for delta in deltas] == [None, None, "hm", None, None]
    assert [delta.get("content") for delta in deltas] == ["", "a", "b", "c", None]


def _choices(chunks: list[Any]) -> list[Any]:
    return [chunk["choices"][0] for chunk in chunks]
