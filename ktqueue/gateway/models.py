"""GET /v1/models and /v1/models/{id}: the models that some worker serves, or served a moment ago."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ktqueue.broker.models import model_not_found
from ktqueue.core.model_card import ModelCard
from ktqueue.gateway.replies import json_response


def model_json(card: ModelCard) -> dict[str, Any]:
    """A model as OpenAI lists it, with the context length under vLLM's name and facts of ours."""
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "ktqueue",
        "max_model_len": card.max_model_len,
        "architecture": card.architecture,
        "quantization": card.quantization,
    }


async def list_models(request: Request) -> Response:
    """All models."""
    cards = await request.app.state.gateway.broker.models.cards()
    cards = sorted(cards, key=lambda card: card.name)
    return json_response({"object": "list", "data": [model_json(card) for card in cards]})


async def get_model(request: Request) -> Response:
    """One model. Raises ModelNotFound."""
    name = request.path_params["model_id"]
    cards = await request.app.state.gateway.broker.models.cards()
    for card in cards:
        if card.name == name:
            return json_response(model_json(card))
    raise model_not_found(name, cards)
