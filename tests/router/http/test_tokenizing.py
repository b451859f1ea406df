import pytest

from router.http.backend import HI, FakeBackend, post


async def test_tokens_and_their_text(subtests: pytest.Subtests) -> None:
    for prompt in [{"prompt": "Hi"}, {"messages": HI}, {"prompt": [72, 73]}]:
        with subtests.test(prompt=prompt):
            backend = FakeBackend()
            answer = await post(
                backend, "/tokenize", {"model": "tiny", **prompt, "add_special_tokens": False}
            )
            assert answer.json() == {"count": 3, "max_model_len": 512, "tokens": [72, 73, 33]}
            (request,) = backend.requests
            assert request.model == "tiny"
            told = (await post(backend, "/tokenize", {**prompt, "return_token_strs": True})).json()
            assert told["token_strs"] == ["H", "I", "!"]
    with subtests.test("the text of tokens"):
        answer = await post(FakeBackend(), "/detokenize", {"model": "tiny", "tokens": [72, 73]})
        assert answer.json() == {"prompt": "HI", "text": "HI"}
    for path, body, param in [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": ["a", "b"]}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ]:
        with subtests.test(path=path):
            answer = await post(FakeBackend(), path, body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
