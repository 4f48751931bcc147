"""GET /v1/models and /v1/models/{id}: the models that a worker serves, or served a moment ago."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ktqueue.broker.models import WorkerInfo, find_card, model_not_found
from ktqueue.core.model_card import SHORT_DIGEST, ModelCard
from ktqueue.gateway.http.responses import json_response
from ktqueue.gateway.listing import page_json


def model_json(card: ModelCard, workers: Sequence[WorkerInfo], name: str) -> dict[str, Any]:
    """A model in OpenAI's and Anthropic's form, with context length and `root` under vLLM's names, and our own fields.

    `name` is the model's own or an alias.

    `digests`: those of the workers that serve the model now, or of the last one that did. There is more than one only
    while the model is being replaced.
    """
    digests = sorted(
        {worker.digest[:SHORT_DIGEST] for worker in workers if worker.model == card.name and worker.digest}
    )
    return {
        "id": name,
        "object": "model",
        "created": card.created,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(card.created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": card.max_model_len,
        "owned_by": "ktqueue",
        "root": card.name,
        "max_model_len": card.max_model_len,
        "architecture": card.architecture,
        "quantization": card.quantization,
        "digests": digests or ([card.short_digest] if card.digest else []),
    }


async def list_models(request: Request) -> Response:
    """All models, under each of their names."""
    models = request.app.state.gateway.broker.models
    cards, workers = await models.cards(), await models.workers()
    names = {card.name for card in cards}
    listed = [
        model_json(card, workers, name)
        for card in cards
        for name in (card.name, *(alias for alias in card.aliases if alias not in names))
    ]
    return json_response(page_json(listed, dict, has_more=False))


async def get_model(request: Request) -> Response:
    """One model. Raises ModelNotFound."""
    name = request.path_params["model_id"]
    models = request.app.state.gateway.broker.models
    cards = await models.cards()
    card = find_card(cards, name)
    if card is None:
        raise model_not_found(name, cards)
    return json_response(model_json(card, await models.workers(), name))
