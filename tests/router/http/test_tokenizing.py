from typing import Any

import pytest

from router.http.backend import HI, FakeBackend, post


@pytest.mark.parametrize("prompt", [{"prompt": "Hi"}, {"messages": HI}, {"prompt": [72, 73]}])
async def test_a_prompts_tokens(prompt: dict[str, Any]) -> None:
    backend = FakeBackend()
    answer = await post(backend, "/tokenize", {"model": "tiny", **prompt, "add_special_tokens": False})
    assert answer.json() == {"count": 3, "max_model_len": 512, "tokens": [72, 73, 33]}
    (request,) = backend.requests
    assert request.model == "tiny"
    told = (await post(backend, "/tokenize", {**prompt, "return_token_strs": True})).json()
    assert told["token_strs"] == ["H", "I", "!"]


async def test_the_text_of_tokens() -> None:
    answer = await post(FakeBackend(), "/detokenize", {"model": "tiny", "tokens": [72, 73]})
    assert answer.json() == {"prompt": "HI", "text": "HI"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": ["a", "b"]}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
async def test_what_is_wrong_is_named(path: str, body: dict[str, Any], param: str) -> None:
    answer = await post(FakeBackend(), path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
