"""Answers to clients of HTTP/1.0: what has no length ends with the connection, since they know no chunks."""

from typing import Any

from starlette.applications import Starlette
from starlette.types import Message, Receive, Scope, Send


class Http10:
    """ASGI middleware, the outermost: it must see the server's own `send`, which decides how a body is framed."""

    def __init__(self, app: Starlette) -> None:
        self._app = app
        self.state = app.state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        exchange: Any = getattr(send, "__self__", None)  # uvicorn's, which closes such a connection by itself
        if scope["type"] != "http" or scope["http_version"] != "1.0" or not hasattr(exchange, "chunked_encoding"):
            await self._app(scope, receive, send)
            return
        endless = False

        async def send_unframed(message: Message) -> None:
            nonlocal endless
            if message["type"] == "http.response.start":
                endless = all(name.lower() != b"content-length" for name, _ in message["headers"])
                if endless:
                    exchange.chunked_encoding = False
            elif endless:
                exchange.expected_content_length = len(message.get("body", b""))  # of this piece, so it always fits
            await send(message)

        await self._app(scope, receive, send_unframed)
