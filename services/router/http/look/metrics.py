"""The router's metrics on the port of its APIs, as vLLM and SGLang have theirs."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from services.observe.metrics_page import MetricsPage
from services.router.keys import callers
from services.values.errors import Forbidden


class Metrics:
    """An endpoint."""

    def __init__(self, page: MetricsPage) -> None:
        self._page = page

    async def show(self, request: Request) -> Response:
        """They are of everybody's requests: not for a tenant's key, unless it is an operator's, too."""
        caller = callers.current()
        if caller.tenant is not None and not caller.is_operator:
            raise Forbidden("metrics are of all tenants: this API key is one tenant's")
        accept = request.headers.get("accept", "")
        body, content_type = await asyncio.to_thread(self._page.rendered, accept)
        return Response(body, headers={"content-type": content_type})
