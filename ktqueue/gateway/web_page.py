"""The web page at /: a chat, and the state of workers, queues and jobs. Its three files are in the folder `page`."""

from collections.abc import Mapping
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ktqueue.gateway.health import pointer

_FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
_HEADERS: Mapping[str, str] = {
    # The page loads nothing from elsewhere and runs no script but its own, whatever a model writes.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def page_routes() -> list[Route]:
    """The routes of the page and its files. At /, clients that do not ask for HTML get the list of routes."""
    folder = resources.files("ktqueue.gateway") / "page"
    contents = {path: (folder / name).read_bytes() for path, (name, _) in _FILES.items()}

    async def send(request: Request) -> Response:
        path = request.url.path
        if path == "/" and "text/html" not in request.headers.get("accept", ""):
            return await pointer(request)
        return Response(contents[path], media_type=_FILES[path][1], headers=_HEADERS)

    return [Route(path, send) for path in _FILES]
