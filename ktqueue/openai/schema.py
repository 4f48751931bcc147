"""The shapes of answers, for /openapi.json. Answers are built as plain data, and tests compare them with these."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Shape(BaseModel):
    """An answer, which may have more fields than are described."""

    model_config = ConfigDict(extra="allow")


class ErrorDetail(Shape):
    """What went wrong, with `limit` and `value` if a limit was broken."""

    message: str
    type: str
    param: str | None
    code: str | None
    limit: float | str | None = None
    value: float | str | None = None


class ErrorResponse(Shape):
    """The body of every error."""

    error: ErrorDetail


class PromptTokensDetails(Shape):
    """Parts of the prompt's tokens."""

    cached_tokens: int


class CompletionTokensDetails(Shape):
    """Parts of the answer's tokens."""

    reasoning_tokens: int


class UsageTimings(Shape):
    """Seconds of a job in each part."""

    queue_seconds: float
    tokenise_seconds: float
    prefill_seconds: float
    decode_seconds: float


class CompletionUsage(Shape):
    """Token counts, and the seconds that they took if the request has `timings: true`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None
    timings: UsageTimings | None = None


class TopLogprob(Shape):
    """A token that could have been chosen."""

    token: str
    logprob: float = Field(le=0)
    bytes: list[int] | None


class TokenLogprobs(TopLogprob):
    """The chosen token and the likeliest tokens."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Shape):
    """Logprobs of a chat choice."""

    content: list[TokenLogprobs] | None
    refusal: None = None


class PromptLogprob(Shape):
    """A token that could be at a place of the prompt. `rank` from 1, null if it is not among the likeliest."""

    logprob: float = Field(le=0)
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id, null for the first token


class CalledFunction(Shape):
    """A function that the model calls, with arguments in JSON."""

    name: str
    arguments: str


class ChatToolCall(Shape):
    """A tool call of the model."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Shape):
    """The message of the model. `function_call` is the old form of `tool_calls`."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | None = None
    tool_calls: list[ChatToolCall] = []
    function_call: CalledFunction | None = None


ChatFinishReason = Literal["stop", "length", "tool_calls", "function_call"]


class ChatChoice(Shape):
    """One choice."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    token_ids: list[int] = []


class ChatCompletion(Shape):
    """The answer to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None = None
    service_tier: str | None = None
    choices: list[ChatChoice]
    usage: CompletionUsage
    prompt_token_ids: list[int] = []
    prompt_logprobs: PromptLogprobs = []


class FunctionDelta(Shape):
    """A piece of a call: the name first, then pieces of the arguments."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(Shape):
    """A piece of the tool call with this index. `id` and `type` are in its first piece."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(Shape):
    """New content: the role in a choice's first chunk, then text, reasoning or calls, nothing in its last chunk."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] = []
    function_call: FunctionDelta | None = None


class ChatChunkChoice(Shape):
    """One choice's part of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None
    token_ids: list[int] = []


class ChatCompletionChunk(Shape):
    """One event of a chat stream. If usage was asked for, the last event has usage and no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str | None = None
    service_tier: str | None = None
    choices: list[ChatChunkChoice]
    usage: CompletionUsage | None = None
    prompt_token_ids: list[int] = []


class CompletionLogprobs(Shape):
    """Logprobs of a completion choice: four lists of equal length. The first token of an echoed prompt has null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Shape):
    """One choice. In a stream, `finish_reason` is null except in the choice's last chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    prompt_token_ids: list[int] = []
    token_ids: list[int] = []
    prompt_logprobs: PromptLogprobs = []


class TextCompletion(Shape):
    """A completion, and each event of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None = None
    service_tier: str | None = None
    choices: list[CompletionChoice]
    usage: CompletionUsage | None = None


class Tokens(Shape):
    """Token ids of a text. `count`, `max_model_len` and `token_strs` only if it was sent as `prompt` or `messages`."""

    tokens: list[int] | list[dict[str, Any]]
    count: int | None = None
    max_model_len: int | None = None
    token_strs: list[str] | None = None


class PromptText(Shape):
    """The text of token ids or of messages, which is also called `content` if token ids were sent."""

    prompt: str
    content: str | None = None


class InputTokens(Shape):
    """The number of tokens of a response's prompt."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class ResponseObject(Shape):
    """A response of /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None


class Model(Shape):
    """A served model. `type`, `display_name`, `created_at`, `lifecycle` and `max_input_tokens` are of Anthropic."""

    id: str
    object: Literal["model"]
    created: int
    type: Literal["model"]
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int
    owned_by: str
    root: str
    max_model_len: int
    architecture: str
    quantization: str
    digests: list[str]


class ModelList(Shape):
    """All models that are served."""

    object: Literal["list"]
    data: list[Model]
    has_more: Literal[False]
    first_id: str | None
    last_id: str | None


class JobResult(Shape):
    """The text of one choice of a job that has ended."""

    index: int
    text: str
    finish_reason: Literal["stop", "length"] | None


class Job(Shape):
    """A job. Times in Unix seconds; `position` in the queue, from 1."""

    id: str
    object: Literal["job"]
    state: Literal["queued", "running", "done", "failed", "cancelled", "expired"]
    model: str
    digest: str | None
    job_class: Literal["interactive", "batch"]
    priority: int | None
    created_at: float
    started_at: float | None
    finished_at: float | None
    attempts: int
    worker_id: str | None
    position: int | None
    user: str | None
    metadata: dict[str, str]
    usage: CompletionUsage | None
    error: ErrorDetail | None
    retried_as: str | None
    events_url: str
    result: list[JobResult] | None = Field(None, description="Only from GET /v1/jobs/{job_id}, once the job has ended.")


class JobList(Shape):
    """A list of jobs."""

    object: Literal["list"]
    data: list[Job]


class JobPrompt(Shape):
    """A part of the prompt: token ids, text and log probabilities. The first token has null instead."""

    token_ids: list[int] = []
    text: str = ""
    logprobs: list[dict[str, Any] | None] = []


class JobEvent(Shape):
    """One event of a job's journal: the data of a server-sent event whose id is `seq`."""

    seq: int = Field(ge=1)
    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[dict[str, Any]] = []
    finish_reason: Literal["stop", "length"] | None = None
    state: Literal["done", "failed", "cancelled", "expired"] | None = None
    usage: CompletionUsage | None = None
    error: ErrorDetail | None = None
    prompt: JobPrompt | None = None


class HealthStatus(Shape):
    """The gateway works."""

    status: Literal["ok"]


class FirstTokenTotals(Shape):
    """Seconds to the first token, summed over all requests of this gateway, and their number."""

    seconds: float
    count: int


class Status(Shape):
    """Workers and queues at one moment, as `ktqueue top --json` writes them."""

    time: float
    tokens_per_second: float
    workers: list[dict[str, Any]]
    queues: list[dict[str, Any]]
    first_token: FirstTokenTotals


class Version(Shape):
    """The version of the gateway."""

    version: str
