"""The outermost layer of every request: its id, its place among the connections, its key, its count.

Nothing of an unexpected error reaches the client but that it happened, and the request id to ask about.
"""

import logging
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ktqueue.core.errors import KtqueueError
from ktqueue.gateway.access_log import log_request
from ktqueue.gateway.auth import OPEN_PATHS
from ktqueue.gateway.faults import InternalError, TooManyConnections
from ktqueue.gateway.gateway import Gateway
from ktqueue.gateway.headers import request_id
from ktqueue.gateway.replies import error_response

logger = logging.getLogger(__name__)


class Edge:
    """ASGI middleware around the routes."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway
        self._active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        id_ = request_id(headers)
        status = 0
        job_ids: str | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status, job_ids
            if message["type"] == "http.response.start":
                status = message["status"]
                answered = MutableHeaders(scope=message)
                answered["x-request-id"] = id_
                job_ids = answered.get("x-job-id")
            await send(message)

        begun = time.monotonic()
        self._active += 1
        self._gateway.metrics.http_in_progress.inc()
        try:
            await self._serve(scope, headers, receive, send_with_id)
        except Exception:
            logger.exception("request %s: %s %s", id_, scope["method"], scope["path"])
            if status:
                raise
            refusal = InternalError(f"the gateway made a mistake; its log tells of request {id_}")
            await error_response(refusal)(scope, receive, send_with_id)
        finally:
            self._active -= 1
            self._gateway.metrics.http_in_progress.dec()
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if route != "other" else "other"
            self._gateway.metrics.http_requests.labels(method, route, str(status or 499)).inc()
            seconds = time.monotonic() - begun
            self._gateway.metrics.http_duration.labels(route).observe(seconds)
            log_request(scope, status=status, seconds=seconds, request_id=id_, job_ids=job_ids)

    async def _serve(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        limit = self._gateway.config.gateway.max_connections
        try:
            # Probes and metrics are let in, or an overload would look like a death.
            if self._active > limit and scope["path"] not in (OPEN_PATHS | {"/metrics"}):
                raise TooManyConnections(
                    f"this gateway serves at most {limit} requests at once", limit=limit, value=self._active
                )
            scope["tenant"] = self._gateway.keys.tenant(scope["path"], headers)
        except KtqueueError as error:
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)
