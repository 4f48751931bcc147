"""Puts the gateway together: its routes, its error responses, and the start and stop of what they share."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ktqueue.core.config import Config
from ktqueue.core.errors import KtqueueError
from ktqueue.gateway import batches, files, health, jobs, models, responses
from ktqueue.gateway.conversations import StreamEndpoint
from ktqueue.gateway.errors import MethodNotAllowed, RouteNotFound, TooManyBodyBytes, TooManyConnections, TooManyUploads
from ktqueue.gateway.gateway import Gateway
from ktqueue.gateway.generation import generation_routes
from ktqueue.gateway.http.edge import Edge
from ktqueue.gateway.http.headers import EXPOSED_HEADERS
from ktqueue.gateway.http.hosts import AllowedHosts
from ktqueue.gateway.http.responses import error_response
from ktqueue.gateway.ollama import ollama_routes
from ktqueue.gateway.prompts import prompt_routes
from ktqueue.gateway.unserved import unserved
from ktqueue.gateway.web_page import page_routes

SHORT = (
    "/v1/models", "/v1/chat/", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/tokenize", "/v1/detokenize",
    "/v1/apply-template",
)  # fmt: skip

logger = logging.getLogger(__name__)


def create_app(config: Config) -> Starlette:
    """The gateway as an ASGI application. Its lifespan opens the broker, and raises Unavailable if none answers."""
    gateway = Gateway(config)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await gateway.open()
        # Every gateway ends late jobs and restarts those of dead workers.
        reaper = asyncio.create_task(gateway.broker.reaper().run(), name="reaper")
        try:
            yield
        finally:
            gateway.interrupt()
            await gateway.finish_background()
            reaper.cancel()
            await asyncio.gather(reaper, return_exceptions=True)
            gateway.bodies.close()
            gateway.grammars.close()
            if gateway.profile is not None:
                gateway.profile.close()
            await gateway.broker.close()

    app = Starlette(
        routes=[*(page_routes() if config.gateway.web_page else ()), *routes(), *short_routes()],
        middleware=[*_cors(config.gateway.cors_origins), _edge(gateway)],
        exception_handlers={KtqueueError: _on_error, HTTPException: _on_http_error},
        lifespan=lifespan,
    )
    app.state.gateway = gateway
    app.state.status = health.StatusReader()
    return app


def routes() -> list[Route]:
    """Every path of the gateway."""
    return [
        Route("/", health.pointer),
        Route("/v1/status", health.status),
        Route("/healthz", health.healthz),
        Route("/health", health.healthz),
        Route("/ping", health.healthz),
        Route("/readyz", health.readyz),
        Route("/version", health.version),
        Route("/metrics", health.metrics),
        Route("/openapi.json", health.openapi),
        Route("/v1/models", models.list_models),
        Route("/v1/models/{model_id:path}", models.get_model),
        *generation_routes(),
        *prompt_routes(),
        *ollama_routes(),
        Route("/v1/responses", responses.create_response, methods=["POST"]),
        Route("/v1/responses/{response_id}", responses.ResponseEndpoint),
        Route("/v1/responses/{response_id}/cancel", responses.cancel_response, methods=["POST"]),
        Route("/v1/responses/{response_id}/input_items", responses.list_input_items),
        Route("/v1/batches", batches.BatchesEndpoint),
        Route("/v1/batches/{batch_id}", batches.get_batch),
        Route("/v1/batches/{batch_id}/cancel", batches.cancel_batch, methods=["POST"]),
        Route("/v1/files", files.FilesEndpoint),
        Route("/v1/files/{file_id}", files.FileEndpoint),
        Route("/v1/files/{file_id}/content", files.read_content),
        Route("/v1/stream", StreamEndpoint),
        Route("/v1/jobs", jobs.JobsEndpoint),
        Route("/v1/jobs/{job_id}", jobs.JobEndpoint),
        Route("/v1/jobs/{job_id}/events", jobs.stream_events),
        Route("/v1/jobs/{job_id}/retry", jobs.retry_job, methods=["POST"]),
    ]


def short_routes() -> list[Route]:
    """The routes of OpenAI's API without /v1, as llama.cpp has them."""
    return [
        Route(route.path.removeprefix("/v1"), route.endpoint, methods=sorted(route.methods or ()))
        for route in routes()
        if route.path.startswith(SHORT)
    ]


def _edge(gateway: Gateway) -> Middleware:
    return Middleware(
        Edge,
        keys=gateway.keys,
        hosts=AllowedHosts(gateway.config.gateway),
        metrics=gateway.metrics,
        max_active=gateway.config.gateway.max_connections,
        profile=gateway.profile,
    )


def _cors(origins: Sequence[str]) -> list[Middleware]:
    """Lets pages of these origins read answers. It is outside the edge: a preflight has no key, and pages read refusals
    too."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),  # OpenAI's package sends a dozen headers of its own
            expose_headers=EXPOSED_HEADERS,
        )
    ]


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, KtqueueError)
    # Refusals that anybody can cause at any rate are counted, not logged.
    if error.info().status >= 500 and not isinstance(error, TooManyConnections | TooManyBodyBytes | TooManyUploads):
        logger.warning("%s %s: %s", request.method, request.url.path, error.message)
    return error_response(error, path=request.url.path)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    if error.status_code in (404, 405) and (refusal := unserved(request.url.path)) is not None:
        return error_response(refusal, path=path)
    if error.status_code == 404:
        missing = RouteNotFound(f"there is no {path}; see /openapi.json", param="path", value=path)
        return error_response(missing, path=path)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        not_allowed = MethodNotAllowed(
            f"{path} takes {allowed}, not {request.method}", param="method", limit=allowed, value=request.method
        )
        return error_response(not_allowed, error.headers, path=path)
    return error_response(KtqueueError(error.detail), error.headers, path=path)
