"""Answers to HTTP/1.0 clients. They know no chunks, so a body without a length ends with the connection."""

from typing import Any

from starlette.applications import Starlette
from starlette.types import Message, Receive, Scope, Send


class Http10:
    """The outermost ASGI middleware: it needs the server's own `send`, whose object decides how a body is framed."""

    def __init__(self, app: Starlette) -> None:
        self._app = app
        self.state = app.state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        cycle: Any = getattr(send, "__self__", None)  # uvicorn's RequestResponseCycle, which closes such a connection
        if scope["type"] != "http" or scope["http_version"] != "1.0" or not hasattr(cycle, "chunked_encoding"):
            await self._app(scope, receive, send)
            return
        without_length = False

        async def send_unframed(message: Message) -> None:
            nonlocal without_length
            if message["type"] == "http.response.start":
                without_length = all(name.lower() != b"content-length" for name, _ in message["headers"])
                if without_length:
                    cycle.chunked_encoding = False
            elif without_length:
                # Of this part, so that uvicorn accepts it.
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_unframed)
