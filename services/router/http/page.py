"""The page is a set of static files (static/) that call the HTTP API. Only these files may run in it, and no
other site may frame it.

    /                     index.html, which refers to the files by the digest of all of them
    /page/DIGEST/NAME     a file that never changes: browsers keep it for a year
    /favicon.ico          the icon for browsers that do not read index.html first

All files are read at the start, so that no path reaches the disk.
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
_ASK_AGAIN = "no-cache"  # Browsers keep it, but compare the ETag before they use it.
_ROOT = "page/"  # This is relative in index.html, so that a proxy may serve the page below another path.


@dataclass(frozen=True, slots=True)
class PageFile:
    content: bytes
    media_type: str
    cache_control: str

    @property
    def etag(self) -> str:
        return f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'


def page_files(folder: Path = STATIC) -> Mapping[str, PageFile]:
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


# Scripts and styles come only from this router, and none is in the markup, so that a text from a model or a
# tenant cannot become one. The policy does not cover styles that a script sets through the DOM (CSP 3, 8.3).
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
    def __init__(self, files: Mapping[str, PageFile] | None = None) -> None:
        self._files = page_files() if files is None else files
        self.paths = frozenset(self._files)

    def routes(self) -> Sequence[Route]:
        return [Route(path, self._answer, methods=["GET"]) for path in self._files]

    async def _answer(self, request: Request) -> Response:
        file = self._files[request.url.path]
        headers = {**_HEADERS, "etag": file.etag, "cache-control": file.cache_control}
        if _has(request.headers.get("if-none-match", ""), file.etag):
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers=headers, media_type=file.media_type)


def _has(if_none_match: str, etag: str) -> bool:
    """Compare weakly (RFC 9110, 13.1.2), as a proxy that compresses adds W/."""
    return any(tag.strip().removeprefix("W/") in (etag, "*") for tag in if_none_match.split(","))
