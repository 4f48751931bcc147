"""Endpoints of other servers that ours does not have, and the error that says so by name."""

from collections.abc import Mapping

from ktqueue.core.errors import InvalidRequest

_TEXT_ONLY = "ktqueue serves models that write text"

# The first word or the first two of a path after /v1/, and why there is no such endpoint.
UNSERVED: Mapping[str, str] = {
    "embeddings": "ktqueue has no embedding models",
    "embedding": "ktqueue has no embedding models",
    "pooling": "ktqueue has no embedding models",
    "rerank": "ktqueue has no ranking models",
    "reranking": "ktqueue has no ranking models",
    "score": "ktqueue has no ranking models",
    "classify": "ktqueue has no classification models",
    "audio": _TEXT_ONLY,
    "images": _TEXT_ONLY,
    "videos": _TEXT_ONLY,
    "realtime": _TEXT_ONLY,
    "moderations": "ktqueue has no moderation models",
    "fine_tuning": "ktqueue does not train models",
    "fine-tunes": "ktqueue does not train models",
    "evals": "ktqueue does not evaluate models",
    "assistants": "use /v1/chat/completions",
    "threads": "use /v1/chat/completions",
    "conversations": "send the whole conversation, or previous_response_id",
    "responses/compact": "send the whole conversation, or previous_response_id",
    "vector_stores": "ktqueue stores no documents",
    "containers": "ktqueue runs no programs",
    "messages/batches": "use /v1/batches with the endpoint /v1/messages",
    "uploads": "use /v1/files, whose uploads may be large",
    **dict.fromkeys(("completion", "complete", "generate", "generate_stream"), "use /v1/completions"),
    "props": "use /v1/models",
    "infill": "use the field suffix of /v1/completions",
    "slots": "use /v1/jobs, or `ktqueue top`",
    "lora-adapters": "there are no adapters",
    "load_lora_adapter": "there are no adapters",
    "unload_lora_adapter": "there are no adapters",
}

_MODELS_ARE_FILES = "workers load models: see `ktqueue worker`"
# The word of a path after /api/, and why there is no such endpoint of Ollama's.
UNSERVED_OF_OLLAMA: Mapping[str, str] = {
    **dict.fromkeys(("pull", "push", "create", "copy", "delete", "blobs"), _MODELS_ARE_FILES),
    **dict.fromkeys(("embed", "embeddings"), UNSERVED["embeddings"]),
}


class UnsupportedEndpoint(InvalidRequest):
    """The path is an endpoint of other servers that ktqueue does not have."""

    code = "unsupported_endpoint"
    status = 404


def unserved(path: str) -> UnsupportedEndpoint | None:
    """The error for such a path, or None for any other."""
    if path.startswith("/api/"):
        word = path.removeprefix("/api/").partition("/")[0]
        return _refusal(path, UNSERVED_OF_OLLAMA.get(word))
    words = path.removeprefix("/v1").removeprefix("/").split("/")
    return _refusal(path, UNSERVED.get("/".join(words[:2])) or UNSERVED.get(words[0]))


def _refusal(path: str, reason: str | None) -> UnsupportedEndpoint | None:
    if reason is None:
        return None
    return UnsupportedEndpoint(f"{path[:200]} is not served: {reason}", param="path", limit=reason, value=path[:200])
