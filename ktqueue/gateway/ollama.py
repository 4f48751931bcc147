"""Routes of Ollama's API that tell about models. Those that generate text are in the table of endpoints."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ktqueue import __version__
from ktqueue.broker.models import model_not_found
from ktqueue.core.model_card import ModelCard
from ktqueue.gateway.gateway import Gateway
from ktqueue.gateway.http.responses import json_response
from ktqueue.ollama.models import API_VERSION, model_details, model_list, running_models


def ollama_routes() -> list[Route]:
    """The routes."""
    return [
        Route("/api/tags", _tags),
        Route("/api/ps", _running),
        Route("/api/version", _version),
        Route("/api/show", _show, methods=["POST"]),
    ]


async def _tags(request: Request) -> Response:
    return json_response(model_list(await request.app.state.gateway.broker.models.cards()))


async def _running(request: Request) -> Response:
    models = request.app.state.gateway.broker.models
    live = {worker.model for worker in await models.workers()}
    return json_response(running_models([card for card in await models.cards() if card.name in live]))


async def _version(request: Request) -> Response:
    return json_response({"version": API_VERSION, "ktqueue": __version__})


async def _show(request: Request) -> Response:
    """Raises ModelNotFound."""
    gateway: Gateway = request.app.state.gateway
    name, card = await gateway.read_body(request, _model_and_card)
    if card is None:
        raise model_not_found(name, await gateway.broker.models.cards())
    return json_response(model_details(card))


def _model_and_card(body: dict[str, Any], card: ModelCard | None) -> tuple[str, ModelCard | None]:
    return str(body["model"]), card
