"""The outermost layer of every request: its id, its API key, the limit of requests at once, metrics and access log.

The client of an unexpected error learns only that it happened, and the request id that the log names.
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
from ktqueue.gateway.http.hosts import AllowedHosts
from ktqueue.gateway.http.responses import error_response
from ktqueue.gateway.metrics import Metrics
from ktqueue.profiling.records import RequestRecord
from ktqueue.profiling.writer import RecordWriter

logger = logging.getLogger(__name__)

PROBES = OPEN_PATHS | {"/metrics"}  # always answered, or an overloaded gateway would look dead


class Edge:
    """ASGI middleware around the routes."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: ApiKeys,
        hosts: AllowedHosts,
        metrics: Metrics,
        max_active: int,
        profile: RecordWriter | None = None,
    ) -> None:
        """`max_active`: how many requests may be answered at once. `profile` gets the times of those with jobs."""
        self._profile = profile
        self._app = app
        self._keys = keys
        self._hosts = hosts
        self._metrics = metrics
        self._max_active = max_active
        self.active = 0  # requests that are being answered, without those whose body is still being read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_name = request_id(headers)
        status = 0
        job_ids: str | None = None
        started = ended = 0.0

        async def send_with_id(message: Message) -> None:
            nonlocal status, job_ids, started, ended
            if message["type"] == "http.response.start":
                status, started = message["status"], time.monotonic()
                response_headers = MutableHeaders(scope=message)
                response_headers["x-request-id"] = request_name
                if scope["path"].startswith("/v1/messages"):
                    response_headers["request-id"] = request_name  # Anthropic's name of it
                job_ids = response_headers.get("x-job-id")
            elif not message.get("more_body"):
                ended = time.monotonic()
            await send(message)

        begun = time.monotonic()
        self._metrics.http_in_progress.inc()
        try:
            await self._serve(scope, headers, receive, send_with_id)
        except Exception:
            logger.exception("request %s: %s %s", request_name, scope["method"], scope["path"])
            if status:
                raise
            refusal = InternalError(f"an unexpected error in the gateway; its log names request {request_name}")
            await error_response(refusal, path=scope["path"])(scope, receive, send_with_id)
        finally:
            self._metrics.http_in_progress.dec()
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if route != "other" else "other"
            self._metrics.http_requests.labels(method, route, str(status or 499)).inc()
            seconds = time.monotonic() - begun
            self._metrics.http_duration.labels(route).observe(seconds)
            log_request(scope, status=status, seconds=seconds, request_id=request_name, job_ids=job_ids)
            if self._profile is not None and job_ids and ended:
                record = RequestRecord(request_name, job_ids, route, status, begun, started, ended)
                self._profile.put("requests", record)

    async def _serve(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        slot = _ActiveSlot(self)
        path = scope["path"]
        try:
            self._hosts.check(headers)
            scope["tenant"] = self._keys.tenant(path, headers, _client_host(scope))
            if path not in PROBES:
                refusal = _refusal(scope)
                if refusal is not None:
                    await error_response(refusal, path=scope["path"])(scope, receive, send)
                    return
                if _has_body(scope, headers):
                    self.check_room()
                    receive = slot.take_after_body(receive)
                else:
                    slot.take()
        except KtqueueError as error:
            await error_response(error, path=scope["path"])(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            slot.free()

    def check_room(self) -> None:
        """Raises TooManyConnections if the limit of requests at once is reached."""
        limit = self._max_active
        if self.active >= limit:
            raise TooManyConnections(
                f"this gateway serves at most {limit} requests at once", limit=limit, value=self.active
            )


class _ActiveSlot:
    """A request's slot among those being answered. It is taken once the body has arrived, so that slow senders do not
    keep others out."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._taken = False

    def take(self) -> None:
        """Raises TooManyConnections."""
        if not self._taken:
            self._edge.check_room()
            self._edge.active += 1
            self._taken = True

    def take_after_body(self, receive: Receive) -> Receive:
        """A `receive` that takes the slot with the last part of the body. It raises what `take` raises."""

        async def receive_and_take() -> Message:
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                self.take()
            return message

        return receive_and_take

    def free(self) -> None:
        """Give the slot back, if it was taken."""
        if self._taken:
            self._edge.active -= 1
            self._taken = False


def _client_host(scope: Scope) -> str:
    """The client's address; empty on a Unix socket."""
    client = scope.get("client")
    return "" if client is None else str(client[0])


def _refusal(scope: Scope) -> KtqueueError | None:
    """Why only probes are answered on this connection, if so. `LimitedProtocol` puts it into the scope."""
    state = scope.get("state", {})
    if state.get("probes_only"):
        return RouteNotFound("this port is for /healthz, /readyz and /metrics", param="path", value=scope["path"])
    refusal: KtqueueError | None = state.get("refusal")
    return refusal


def _has_body(scope: Scope, headers: Headers) -> bool:
    """Whether the request has a body that the application will read."""
    announced = headers.get("content-length", "0")
    return scope["method"] == "POST" and ("transfer-encoding" in headers or announced != "0")
