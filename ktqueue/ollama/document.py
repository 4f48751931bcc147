"""Ollama's endpoints and the shapes of their answers, for /openapi.json."""

from typing import Any

from pydantic import BaseModel, Field

from ktqueue.ollama.bodies import CHAT_PATH, GENERATE_PATH, OllamaChatBody, OllamaGenerateBody
from ktqueue.openai.document import Description
from ktqueue.openai.schema import Shape, Version


class OllamaAnswer(Shape):
    """An answer, or a line of a stream. Counts, reason and durations in nanoseconds are in the last line."""

    model: str
    created_at: str
    done: bool
    done_reason: str | None = None
    prompt_eval_count: int | None = None
    eval_count: int | None = None
    logprobs: list[dict[str, Any]] | None = None


class OllamaChatAnswer(OllamaAnswer):
    """The answer of POST /api/chat."""

    message: dict[str, Any]


class OllamaGenerateAnswer(OllamaAnswer):
    """The answer of POST /api/generate."""

    response: str
    thinking: str | None = None


class OllamaModels(BaseModel):
    """The answer of GET /api/tags and /api/ps."""

    models: list[dict[str, Any]]


class OllamaModelName(BaseModel):
    """The body of POST /api/show."""

    model: str = Field(min_length=1, max_length=256)


class OllamaModel(Shape):
    """The answer of POST /api/show."""

    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]


class OllamaError(BaseModel):
    """An error."""

    error: str


_LINES = "application/x-ndjson"
DESCRIPTIONS = (
    Description(CHAT_PATH, "ollamaChat", "Ollama's chat.", OllamaChatAnswer, OllamaError, OllamaChatBody, _LINES),
    Description(
        GENERATE_PATH,
        "ollamaGenerate",
        "Ollama's answer to a prompt.",
        OllamaGenerateAnswer,
        OllamaError,
        OllamaGenerateBody,
        _LINES,
    ),
    Description("/api/show", "ollamaShow", "One model.", OllamaModel, OllamaError, OllamaModelName, is_job=False),
    Description("/api/tags", "ollamaTags", "The models that are served.", OllamaModels, OllamaError),
    Description("/api/ps", "ollamaRunning", "The models that have a live worker.", OllamaModels, OllamaError),
    Description("/api/version", "ollamaVersion", "The version of Ollama whose API this is.", Version, OllamaError),
)
