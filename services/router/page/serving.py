"""The page over HTTP: nothing but its own files may run in it, and nobody else may frame it."""

from collections.abc import Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.router.page.files import PageFile, page_files

# Scripts and styles come from this router alone, and none stands in the markup: what a model or a tenant says
# cannot become one. Styles that a script sets through the DOM are not concerned (CSP 3, 8.3).
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


class Page:
    """`paths` need no key: there is nothing in them that is not in the source."""

    def __init__(self, files: Mapping[str, PageFile] | None = None) -> None:
        self._files = page_files() if files is None else files
        self.paths = frozenset(self._files)

    def routes(self) -> Sequence[Route]:
        return [Route(path, self._answer, methods=["GET"]) for path in self._files]

    async def _answer(self, request: Request) -> Response:
        """Of HEAD, too: whoever serves leaves its body out."""
        file = self._files[request.url.path]
        headers = {**_HEADERS, "etag": file.etag, "cache-control": file.cache_control}
        if _has(request.headers.get("if-none-match", ""), file.etag):
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers=headers, media_type=file.media_type)


def _has(if_none_match: str, etag: str) -> bool:
    """Compared weakly (RFC 9110, 13.1.2): a proxy that compresses makes W/ of it."""
    return any(tag.strip().removeprefix("W/") in (etag, "*") for tag in if_none_match.split(","))
