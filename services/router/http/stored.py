"""Responses that were kept, looked at and deleted. Who asks is told by the header, for there is no body."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.router.dialects.call import TENANT
from services.router.dialects.responses.store import ResponseStore
from services.router.keys import callers


class StoredResponses:
    """Endpoints."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def look(self, request: Request) -> Response:
        stored = self._store.get(*_tenant_and_id(request))
        return Response(stored.response, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        tenant, response_id = _tenant_and_id(request)
        self._store.delete(tenant, response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})


def _tenant_and_id(request: Request) -> tuple[str, str]:
    """Raises Forbidden."""
    return callers.current().tenant_of(request.headers.get(TENANT, "")), request.path_params["id"]
