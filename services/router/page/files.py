"""The page's files, by the path each is served under. All are read at the start: no path reaches the disk.

/                     index.html, which names the files by the digest of them all
/page/DIGEST/NAME     never changes: kept by browsers for a year
/favicon.ico          for browsers that do not read index.html first
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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
_ASK_AGAIN = "no-cache"  # kept, but not used before the ETag has been compared
_ROOT = "page/"  # as index.html has it: relative, so that a proxy may serve the page below a path of its own


@dataclass(frozen=True, slots=True)
class PageFile:
    content: bytes
    media_type: str
    cache_control: str

    @property
    def etag(self) -> str:
        return f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'


def page_files(folder: Path = STATIC) -> Mapping[str, PageFile]:
    """Raises KeyError for a file of no known type."""
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
