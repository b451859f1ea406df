"""What is asked about tokens, without generating any."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.router.dialects.anthropic.messages_call import read_count_request
from services.router.dialects.tokens import read_detokenize_call, read_tokenize_call
from services.router.http.body import BodyReader
from services.router.keys import callers
from services.router.request.generation import Generator


class Tokenizing:
    """Endpoints."""

    def __init__(self, generation: Generator, bodies: BodyReader) -> None:
        self._generation = generation
        self._bodies = bodies

    async def tokenize(self, request: Request) -> Response:
        call = await self._bodies.read(request, read_tokenize_call)
        told = await self._generation.tokenize(callers.own(call.request))
        ids = list(told.token_ids)
        answer = {"count": len(ids), "max_model_len": told.max_context_tokens, "tokens": ids}
        if call.wants_texts:
            answer["token_strs"] = list(map(self._generation.token_text, ids))
        return JSONResponse(answer)

    async def detokenize(self, request: Request) -> Response:
        call = await self._bodies.read(request, read_detokenize_call)
        text = await self._generation.detokenize(call.model, call.token_ids)
        return JSONResponse({"prompt": text, "text": text})  # vLLM's word for it, and SGLang's

    async def count(self, request: Request) -> Response:
        """Anthropic's count_tokens."""
        counted = await self._bodies.read(request, read_count_request)
        told = await self._generation.tokenize(callers.own(counted))
        return JSONResponse({"input_tokens": len(told.token_ids)})
