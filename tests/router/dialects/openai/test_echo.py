"""A prompt's text and tokens before its answer's, and what vLLM tells of them."""

from typing import Any

import pytest

from router.dialects.prompts_told import not_told, told_in_pieces
from router.http.backend import FakeBackend, chat, complete, events
from services.router.dialects.openai_call import read_completion_call
from services.wire.isthmus.v1.common_pb2 import SamplingParams

TOKENS = ["H", "i", "!", "a", "b"]
LOGPROBS = [None, -1.5, -0.5, -0.25, -0.25]
TOP_1 = [None, {"a": -0.5}, {"!": -0.5}, {"a": -0.5, "b": -0.5}, {"a": -0.5, "b": -0.5}]


def sampling_of(**body: Any) -> SamplingParams:
    return read_completion_call({"prompt": "Hi!", **body}, {}).request.sampling


def test_the_prompts_logprobs_are_asked_for_where_they_are_shown() -> None:
    assert not sampling_of(echo=True).HasField("prompt_logprobs")
    assert not sampling_of(logprobs=2).HasField("prompt_logprobs")
    assert sampling_of(echo=True, logprobs=0).prompt_logprobs == 0
    assert sampling_of(echo=True, logprobs=0).HasField("prompt_logprobs")
    assert sampling_of(echo=True, logprobs=1, prompt_logprobs=3).prompt_logprobs == 3
    assert not sampling_of(prompt_logprobs=3).HasField("logprobs")
    assert sampling_of(echo=True, max_tokens=0).max_tokens == 1
    assert sampling_of(max_tokens=0).max_tokens == 0  # refused at the router's door


async def test_it_is_echoed_whole(subtests: pytest.Subtests) -> None:
    # As lm-eval asks for it.
    for prompt in ["Hi!", [72, 105, 33]]:
        with subtests.test(prompt=prompt):
            backend = FakeBackend(*told_in_pieces())
            asked = {"max_tokens": 1, "logprobs": 1, "temperature": 0}
            [choice] = (await complete(backend, prompt=prompt, echo=True, **asked)).json()["choices"]
            assert choice["text"] == "Hi!ab"
            assert choice["logprobs"] == {
                "tokens": TOKENS,
                "token_logprobs": LOGPROBS,
                "top_logprobs": TOP_1,
                "text_offset": [0, 1, 2, 3, 4],
            }
            assert backend.requests[0].sampling.prompt_logprobs == 1
    with subtests.test("a character that spans tokens is echoed whole"):
        answer = await complete(FakeBackend(*told_in_pieces()), prompt=[72, 0xC3, 0xA9], echo=True)
        assert answer.json()["choices"][0]["text"] == "H\u00e9ab"
    with subtests.test("without logprobs it is text alone"):
        [choice] = (await complete(FakeBackend(*told_in_pieces()), prompt="Hi!", echo=True)).json()["choices"]
        assert (choice["text"], choice["logprobs"]) == ("Hi!ab", None)


async def test_the_prompt_alone(subtests: pytest.Subtests) -> None:
    for stream in [False, True]:
        with subtests.test(stream=stream):
            body = {"prompt": "Hi!", "echo": True, "max_tokens": 0, "logprobs": 1, "return_token_ids": True}
            if stream:
                body |= {"stream": True, "stream_options": {"include_usage": True}}
            answer = await complete(FakeBackend(*told_in_pieces()), **body)
            told = events(answer)[:-1] if stream else [answer.json()]
            choices = [choice for each in told for choice in each["choices"]]
            assert "".join(choice["text"] for choice in choices) == "Hi!"
            assert [token for choice in choices for token in choice["logprobs"]["tokens"]] == TOKENS[:3]
            assert choices[-1]["finish_reason"] == "length"
            assert not any(choice["token_ids"] for choice in choices)
            assert told[-1]["usage"]["completion_tokens"] == 0
            assert told[-1]["usage"]["total_tokens"] == told[-1]["usage"]["prompt_tokens"] == 3


async def test_it_is_echoed_once_in_a_stream() -> None:
    body = {"prompt": "Hi!", "echo": True, "logprobs": 1, "stream": True}
    chunks = events(await complete(FakeBackend(*told_in_pieces()), **body))[:-1]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["text"] for choice in choices] == ["Hi!", "a", "b"]
    parts = [choice["logprobs"] for choice in choices]
    assert [len(part["tokens"]) for part in parts] == [2, 2, 1]
    for name, expected in (("tokens", TOKENS), ("token_logprobs", LOGPROBS), ("top_logprobs", TOP_1)):
        assert [each for part in parts for each in part[name]] == expected
    assert [each for part in parts for each in part["text_offset"]] == [0, 1, 2, 3, 4]


async def test_each_choice_echoes_its_own_prompt() -> None:
    """So it is with two prompts, and with several answers to one."""
    script = [*told_in_pieces(0), *not_told(1)]
    body: dict[str, Any] = {"prompt": "Hi!", "n": 2, "echo": True}
    texts = ["", ""]
    for chunk in events(await complete(FakeBackend(*script), **body, stream=True))[:-1]:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["Hi!ab"] * 2
    answer = (await complete(FakeBackend(*script), **body, logprobs=1, prompt_logprobs=0)).json()
    assert [choice["text"] for choice in answer["choices"]] == ["Hi!ab"] * 2
    assert [choice["logprobs"]["tokens"] for choice in answer["choices"]] == [TOKENS] * 2
    assert [len(choice["prompt_logprobs"]) for choice in answer["choices"]] == [3, 3]


async def test_what_vllm_tells_of_a_prompt(subtests: pytest.Subtests) -> None:
    # The token itself first; others as many as were asked for, though echo asks for more.
    with subtests.test("what vllm tells of a prompt"):
        expected = [
            None,
            {
                "105": {"logprob": -1.5, "rank": 3, "decoded_token": "i"},
                "97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
            },
            {"33": {"logprob": -0.5, "rank": 1, "decoded_token": "!"}},
        ]
        backend = FakeBackend(*told_in_pieces())
        asked = {"prompt_logprobs": 1, "echo": True, "logprobs": 2}
        answer = (await complete(backend, prompt="Hi!", **asked)).json()
        assert answer["choices"][0]["prompt_logprobs"] == expected
        assert "prompt_logprobs" not in answer
        answer = (await chat(FakeBackend(*told_in_pieces()), prompt_logprobs=1)).json()
        assert answer["prompt_logprobs"] == expected
        assert "prompt_logprobs" not in (await chat(FakeBackend(*told_in_pieces()))).json()
    with subtests.test("an unknown rank is null"):
        script = told_in_pieces()
        script[0].prompt_logprobs[0].chosen.rank = 0
        answer = (await chat(FakeBackend(*script), prompt_logprobs=0)).json()
        assert answer["prompt_logprobs"][1] == {"105": {"logprob": -1.5, "rank": None, "decoded_token": "i"}}
