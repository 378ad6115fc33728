"""Static files of the web page, served from the package: no build, no external URLs.

The files are served without a key, because a browser has no key when it opens the page. They reveal nothing about the
gateway. The data on the page is returned by routes that require a key. A file is read at its first request.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from unisono.api.route_table import RouteTable
from unisono.core.frozen import dataclass
from unisono.errors import NotFound

FOLDER: Final = Path(__file__).parent / "static"
PREFIX: Final = "/page/"
TYPES: Final[Mapping[str, str]] = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
# A request selects from these paths only, so no path can leave the folder.
FILES: Final = frozenset(
    path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file() and path.suffix in TYPES
)
# Routes of the page. The layers of `api.asgi_layers` must run first, with PATHS open.
PAGE: Final = RouteTable("page", prefixes=("",))
# Paths that need no key.
PATHS: Final = frozenset({"/", "/docs", *(f"{PREFIX}{name}" for name in FILES if name != "index.html")})

# The page executes and loads only its own files, and cannot be embedded. Therefore recorded text cannot run a script or
# send data to other servers.
HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # File names do not change with their content, so browsers must revalidate each time.
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class File:
    content: bytes
    headers: Mapping[str, str]


@cache
def file_of(name: str) -> File:
    content = (FOLDER / name).read_bytes()
    tag = f'"{sha256(content).hexdigest()[:32]}"'
    return File(content, {**HEADERS, "content-type": TYPES[Path(name).suffix], "etag": tag})


@PAGE.add("GET", "/", needs_key=False, direct=True, include_in_schema=False)
async def get_page(request: Request) -> Response:
    """Return the page."""
    return _answer(request, "index.html")


@PAGE.add("GET", "/docs", needs_key=False, direct=True, include_in_schema=False)
async def get_reference(request: Request) -> Response:
    """Return the page, which opens with the API reference."""
    return _answer(request, "index.html")


@PAGE.add("GET", f"{PREFIX}{{name:path}}", needs_key=False, direct=True, include_in_schema=False)
async def get_file(request: Request) -> Response:
    """Return a file of the page."""
    if (name := request.path_params["name"]) not in FILES:
        raise NotFound("The page has no file with this name.")
    return _answer(request, name)


def _answer(request: Request, name: str) -> Response:
    file = file_of(name)
    # A proxy that compresses the file adds W/ to the tag.
    tags = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if file.headers["etag"] in tags:
        return Response(status_code=304, headers=dict(file.headers))
    return Response(file.content, headers=dict(file.headers))
