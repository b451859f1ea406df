"""What a server says of itself, in the words of vLLM's and SGLang's clients."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.observe import build_info
from services.router.dialects.openai.errors import error_object
from services.router.keys import callers
from services.router.request.generation import Generator

_NO_FLUSH = (
    "this router empties no cache: ranks serve other routers, too. Give each run a cache_salt of its own, or "
    "start the cluster again"
)


class About:
    """Endpoints. `model_path`: the directory of the model, with its tokenizer, on this machine. An operator
    is told it, and where no keys are asked for everybody is; others are told the model's name instead."""

    def __init__(self, generation: Generator, model_path: str) -> None:
        self._generation = generation
        self._model_path = model_path
        self._version = build_info.versions()["version"]

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": self._version})

    async def model_info(self, request: Request) -> Response:
        path = self._told_path(await self._name())
        return JSONResponse({"model_path": path, "tokenizer_path": path, "is_generation": True})

    async def server_info(self, request: Request) -> Response:
        """SGLang's has its settings and each scheduler's state; `isthmus status` and metrics have ours."""
        name = await self._name()
        names = {"served_model_name": name, "model_path": self._told_path(name)}
        return JSONResponse({"version": self._version, **names, "internal_states": []})

    async def _name(self) -> str:
        models = self._generation.list_models().models
        return models[0].id if models else ""

    def _told_path(self, name: str) -> str:
        return self._model_path if callers.current().is_operator else name

    async def flush_cache(self, request: Request) -> Response:
        return JSONResponse(error_object(_NO_FLUSH, 501, None, 501), status_code=501)
