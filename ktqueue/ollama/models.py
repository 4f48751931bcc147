"""Models in Ollama's form: its list, its running models, and the details of one."""

from collections.abc import Sequence

from ktqueue.core.codec import Json
from ktqueue.core.model_card import ModelCard
from ktqueue.ollama.reply import timestamp

API_VERSION = "0.14.2"
"""The version of Ollama whose API this is. Clients refuse servers that say less, such as Copilot Chat below 0.6.4."""
NEVER = "2318-01-01T00:00:00Z"  # Ollama's programs call a time in more than 20 years "Forever"


def _details(card: ModelCard) -> Json:
    return {
        "parent_model": "",
        "format": "",
        "family": card.architecture,
        "families": [card.architecture],
        "parameter_size": "",
        "quantization_level": card.quantization,
    }


def _entry(card: ModelCard, name: str) -> Json:
    """`size` is 0, since the gateway does not know it."""
    return {"name": name, "model": name, "size": 0, "digest": card.digest, "details": _details(card)}


def model_list(cards: Sequence[ModelCard]) -> Json:
    """The answer of GET /api/tags: every model under each of its names."""
    return {
        "models": [
            {**_entry(card, name), "modified_at": timestamp(card.created)}
            for card in cards
            for name in (card.name, *card.aliases)
        ]
    }


def running_models(cards: Sequence[ModelCard]) -> Json:
    """The answer of GET /api/ps. `cards`: of the models that have a live worker."""
    more = {"size_vram": 0, "expires_at": NEVER}
    return {"models": [{**_entry(card, card.name), **more, "context_length": card.max_model_len} for card in cards]}


def model_details(card: ModelCard) -> Json:
    """The answer of POST /api/show."""
    capabilities = ["completion"]
    if card.tool_parser:
        capabilities.append("tools")
    if card.reasoning_parser:
        capabilities.append("thinking")
    return {
        "modified_at": timestamp(card.created),
        "details": _details(card),
        "model_info": {
            "general.architecture": card.architecture,
            "general.basename": card.name,
            f"{card.architecture}.context_length": card.max_model_len,
            f"{card.architecture}.vocab_size": card.vocab_size,
        },
        "capabilities": capabilities,
        "parameters": "\n".join(f"{name} {value}" for name, value in card.sampling_defaults.items()),
        "template": "",
        "modelfile": "",
    }
