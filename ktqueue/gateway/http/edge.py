"""The outermost layer of every request: its id, its place among the connections, its key, its count.

Nothing of an unexpected error reaches the client but that it happened, and the request id to ask about.
"""

import logging
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ktqueue.core.errors import KtqueueError
from ktqueue.gateway.errors import InternalError, RouteNotFound, TooManyConnections
from ktqueue.gateway.http.access_log import log_request
from ktqueue.gateway.http.auth import OPEN_PATHS, ApiKeys
from ktqueue.gateway.http.headers import request_id
from ktqueue.gateway.http.responses import error_response
from ktqueue.gateway.metrics import Metrics

logger = logging.getLogger(__name__)

PROBES = OPEN_PATHS | {"/metrics"}  # let in whatever happens, or an overload would look like a death


class Edge:
    """ASGI middleware around the routes."""

    def __init__(self, app: ASGIApp, *, keys: ApiKeys, metrics: Metrics, max_active: int) -> None:
        """`max_active`: how many requests may be answered at once."""
        self._app = app
        self._keys = keys
        self._metrics = metrics
        self._max_active = max_active
        self.active = 0  # requests that are being answered, without those whose body is still coming

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
        self._metrics.http_in_progress.inc()
        try:
            await self._serve(scope, headers, receive, send_with_id)
        except Exception:
            logger.exception("request %s: %s %s", id_, scope["method"], scope["path"])
            if status:
                raise
            refusal = InternalError(f"the gateway made a mistake; its log tells of request {id_}")
            await error_response(refusal)(scope, receive, send_with_id)
        finally:
            self._metrics.http_in_progress.dec()
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if route != "other" else "other"
            self._metrics.http_requests.labels(method, route, str(status or 499)).inc()
            seconds = time.monotonic() - begun
            self._metrics.http_duration.labels(route).observe(seconds)
            log_request(scope, status=status, seconds=seconds, request_id=id_, job_ids=job_ids)

    async def _serve(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        place = _Place(self)
        path = scope["path"]
        try:
            scope["tenant"] = self._keys.tenant(path, headers)
            if path not in PROBES:
                refusal = _refusal(scope)
                if refusal is not None:
                    await error_response(refusal)(scope, receive, send)
                    return
                if _has_body(scope, headers):
                    self.check_room()
                    receive = place.taken_with_body(receive)
                else:
                    place.take()
        except KtqueueError as error:
            await error_response(error)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            place.free()

    def check_room(self) -> None:
        """Raises TooManyConnections if as many requests are being answered as may be."""
        limit = self._max_active
        if self.active >= limit:
            raise TooManyConnections(
                f"this gateway serves at most {limit} requests at once", limit=limit, value=self.active
            )


class _Place:
    """A request's place among those that are answered. It is taken once the body is there: whoever sends a body slowly
    keeps nobody out."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._taken = False

    def take(self) -> None:
        """Raises TooManyConnections."""
        if not self._taken:
            self._edge.check_room()
            self._edge.active += 1
            self._taken = True

    def taken_with_body(self, receive: Receive) -> Receive:
        """`receive`, which takes the place with the body's last piece, and then raises what `take` raises."""

        async def receive_and_take() -> Message:
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                self.take()
            return message

        return receive_and_take

    def free(self) -> None:
        """The request is over."""
        if self._taken:
            self._edge.active -= 1
            self._taken = False


def _refusal(scope: Scope) -> KtqueueError | None:
    """Why this connection is for probes alone, if it is: see protocol.py."""
    state = scope.get("state", {})
    if state.get("probes_only"):
        return RouteNotFound("this port is for /healthz, /readyz and /metrics", param="path", value=scope["path"])
    refusal: KtqueueError | None = state.get("refusal")
    return refusal


def _has_body(scope: Scope, headers: Headers) -> bool:
    """Whether a body follows that the application will read."""
    announced = headers.get("content-length", "0")
    return scope["method"] == "POST" and ("transfer-encoding" in headers or announced != "0")
