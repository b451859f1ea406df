"""Which models there are, and whether one could answer."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.router.dialects.answer import Json
from services.router.dialects.anthropic import models as anthropic
from services.router.request.generation import Generator
from services.values.errors import NotFound
from services.wire.isthmus.v1.generation_pb2 import Model


class Models:
    """Endpoints. `created`: seconds since the epoch, when this router came up."""

    def __init__(self, generation: Generator, created: int) -> None:
        self._generation = generation
        self._created = created

    async def health(self, request: Request) -> Response:
        """200 while a request could be taken, though it had to wait; else 503, and why."""
        self._generation.check_usable()
        return JSONResponse({"status": "ok"})

    async def all(self, request: Request) -> Response:
        models = await self._models(request)
        if anthropic.asks(request.headers):
            return JSONResponse(anthropic.models_json(models))
        return JSONResponse({"object": "list", "data": models})

    async def one(self, request: Request) -> Response:
        name = request.path_params["id"]
        if not name:
            return await self.all(request)
        for model in await self._models(request):
            if model["id"] == name:
                return JSONResponse(model)
        raise NotFound(f"model {name!r} is not served here")

    async def _models(self, request: Request) -> list[Json]:
        models = self._generation.list_models().models
        if anthropic.asks(request.headers):
            return [anthropic.model_json(model.id, self._created) for model in models]
        return [self._model(model) for model in models]

    def _model(self, model: Model) -> Json:
        return {
            "id": model.id,
            "object": "model",
            "created": self._created,
            "owned_by": "isthmus",
            "max_model_len": model.max_context_tokens,
        }
