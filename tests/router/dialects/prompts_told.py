"""Responses that tell of their prompt, for a backend to play: "Hi!" and then "ab"."""

from services.wire.isthmus.v1 import common_pb2
from services.wire.isthmus.v1.common_pb2 import TokenLogprob, TokenLogprobs
from services.wire.isthmus.v1.generation_pb2 import Finish, GenerateResponse, Usage

IDS = [72, 105, 33]


def scored(token_id: int, logprob: float, rank: int = 0, *others: int) -> TokenLogprobs:
    top = [TokenLogprob(token_id=other, logprob=-0.5, rank=i) for i, other in enumerate(others, start=1)]
    return TokenLogprobs(chosen=TokenLogprob(token_id=token_id, logprob=logprob, rank=rank), top=top)


PROMPT = [scored(105, -1.5, 3, 97, 98), scored(33, -0.5, 1, 33, 98)]


def told_in_pieces(index: int = 0) -> list[GenerateResponse]:
    """As for a long prompt."""
    usage = Usage(prompt_tokens=3, completion_tokens=2)
    finish = Finish(reason=common_pb2.FINISH_REASON_LENGTH, usage=usage)
    return [
        GenerateResponse(request_id="r1", index=index, prompt_token_ids=IDS, prompt_logprobs=PROMPT[:1]),
        GenerateResponse(
            request_id="r1",
            index=index,
            prompt_logprobs=PROMPT[1:],
            text="a",
            token_ids=[97],
            logprobs=[scored(97, -0.25, 0, 97, 98)],
        ),
        GenerateResponse(
            request_id="r1",
            index=index,
            text="b",
            token_ids=[98],
            logprobs=[scored(98, -0.25, 0, 97, 98)],
            finish=finish,
        ),
    ]


def not_told(index: int) -> list[GenerateResponse]:
    """The same of another answer to the prompt."""
    responses = told_in_pieces(index)[1:]
    del responses[0].prompt_logprobs[:]
    return responses
