"""An answer reports on its prompt in two ways: by the text and tokens that `echo` puts before its own, and by
vLLM's `prompt_logprobs`.

    echo, logprobs: 1      the prompt's tokens before the answer's, null for the first: none is before it
    prompt_logprobs: 1     [null, {id: {logprob, rank, decoded_token}, ...}, ...]
    echo, max_tokens: 0    the prompt alone: ranks generate one token at least, which is left out
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.router.dialects.dialect_answer import Json
from services.router.dialects.json_body import UINT32_MAX, Body
from services.router.dialects.openai.answer_choice import TokenBytes, TokenText, finite
from services.wire.isthmus.v1.common_pb2 import TokenLogprob, TokenLogprobs
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest


@dataclass(frozen=True, slots=True)
class Echo:
    """`num_top` is vLLM's prompt_logprobs; None says that they are not requested."""

    echoes: bool = False
    only: bool = False  # The prompt is reported, and nothing of an answer.
    num_top: int | None = None


NO_ECHO = Echo()


def read_prompt_logprobs(body: Body, request: GenerateRequest, *, echoes: bool = False) -> Echo:
    """Fill in what is requested of the prompt; `logprobs` must have been read. Raises InvalidParameter."""
    num_top = body.integer("prompt_logprobs", 0, UINT32_MAX)
    if num_top is not None and body.flag("stream"):
        raise body.wrong("prompt_logprobs", "is not streamed: set stream to false")
    sampling = request.sampling
    wanted = [] if num_top is None else [num_top]
    if echoes and sampling.HasField("logprobs"):
        wanted.append(sampling.logprobs)
        if body.flag("stream") and request.n > 1:
            raise body.wrong("echo", "with logprobs and n above 1 is not streamed: set stream to false")
    if wanted:
        sampling.prompt_logprobs = max(wanted)
    return Echo(echoes=echoes, num_top=num_top)


def prompt_text(request: GenerateRequest, token_text: TokenText, token_bytes: TokenBytes) -> str:
    """Return the prompt's text. A character of ids may span several, so they are joined by their bytes."""
    if request.WhichOneof("prompt") == "text":
        return str(request.text)
    return b"".join(_utf8(i, token_text, token_bytes) for i in request.token_ids.ids).decode(errors="replace")


def cut(logprobs: Sequence[TokenLogprobs], num_top: int) -> Sequence[TokenLogprobs]:
    if not logprobs or len(logprobs[0].top) <= num_top:
        return logprobs
    return [TokenLogprobs(chosen=token.chosen, top=token.top[:num_top]) for token in logprobs]


def vllm_prompt_logprobs(
    logprobs: Sequence[TokenLogprobs], num_top: int, token_text: TokenText
) -> list[Json | None]:
    """Return vLLM's prompt_logprobs: for each token of the prompt itself and the most probable ones, by
    id."""
    return [None, *(_by_id([token.chosen, *token.top[:num_top]], token_text) for token in logprobs)]


def _by_id(reported: Sequence[TokenLogprob], token_text: TokenText) -> Json:
    """Return them with the token itself first, and with its rank if that is known."""
    by_id: Json = {}
    for each in reported:
        entry = {
            "logprob": finite(each.logprob),
            "rank": each.rank or None,
            "decoded_token": token_text(each.token_id),
        }
        by_id.setdefault(str(each.token_id), entry)
    return by_id


def _utf8(token_id: int, token_text: TokenText, token_bytes: TokenBytes) -> bytes:
    text = token_text(token_id)
    utf8 = token_bytes(token_id) if "\ufffd" in text else None
    return text.encode() if utf8 is None else utf8
