"""The page is a browser's files (static/), which ask the HTTP API for what they show. It is served over HTTP:
nothing but its own files may run in it, and nobody else may frame it.

    /                     index.html, which names the files by the digest of them all
    /page/DIGEST/NAME     never changes: kept by browsers for a year
    /favicon.ico          for browsers that do not read index.html first

All files are read at the start: no path reaches the disk.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

STATIC = Path(__file__).parent / "static"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".ico": "image/x-icon",
    ".txt": "text/plain; charset=utf-8",
}
_FOR_EVER = "public, max-age=31536000, immutable"
_ASK_AGAIN = "no-cache"  # It is kept, but not used before the ETag has been compared.
_ROOT = "page/"  # In index.html it is relative, so that a proxy may serve the page below a path of its own.


@dataclass(frozen=True, slots=True)
class PageFile:
    content: bytes
    media_type: str
    cache_control: str

    @property
    def etag(self) -> str:
        return f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'


def page_files(folder: Path = STATIC) -> Mapping[str, PageFile]:
    """Return the page's files, by the path that each is served under. Raises KeyError for a file of no
    known type."""
    contents = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    root = f"{_ROOT}{_digest(contents)}/"
    files = {f"/{root}{name}": _file(name, content, _FOR_EVER) for name, content in contents.items()}
    index = contents["index.html"].replace(f'"{_ROOT}'.encode(), f'"{root}'.encode())
    files["/"] = _file("index.html", index, _ASK_AGAIN)
    files["/favicon.ico"] = _file("favicon.ico", contents["favicon.ico"], _ASK_AGAIN)
    return files


def _file(name: str, content: bytes, cache_control: str) -> PageFile:
    return PageFile(content, _MEDIA_TYPES[Path(name).suffix], cache_control)


def _digest(contents: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in contents.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


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
        """Answer a request, HEAD too: whoever serves leaves its body out."""
        file = self._files[request.url.path]
        headers = {**_HEADERS, "etag": file.etag, "cache-control": file.cache_control}
        if _has(request.headers.get("if-none-match", ""), file.etag):
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers=headers, media_type=file.media_type)


def _has(if_none_match: str, etag: str) -> bool:
    """Compare weakly (RFC 9110, 13.1.2): a proxy that compresses makes W/ of it."""
    return any(tag.strip().removeprefix("W/") in (etag, "*") for tag in if_none_match.split(","))
