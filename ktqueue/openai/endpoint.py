"""What every endpoint that generates text provides: a parser of its body and a writer of its answers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from ktqueue.core.codec import Json
from ktqueue.core.events import TokenLogprob, Usage
from ktqueue.core.model_card import SHORT_DIGEST, ModelCard
from ktqueue.core.request import GenerationRequest
from ktqueue.openai.choices import Delta, token_text
from ktqueue.openai.client_names import Names
from ktqueue.openai.stream_format import EVENTS, StreamFormat


@dataclass(frozen=True, slots=True)
class Call:
    """What a body asks for: one request for each job, and how the answer is sent.

    `digest` of the model is empty if unknown.
    """

    generations: tuple[GenerationRequest, ...]
    stream: bool
    include_usage: bool  # whether the stream ends with a usage chunk
    digest: str
    at_once: Json | None = None  # the answer, if there is nothing to generate


class EndpointBody(Protocol):
    """A validated body of one endpoint."""

    @property
    def stream(self) -> bool | None:
        """Whether the answer is streamed."""

    def requests(self, card: ModelCard | None) -> tuple[GenerationRequest, ...]:
        """One request for each job. `card`: of the model, if it is known. Raises InvalidRequest."""

    def wants_usage(self) -> bool:
        """Whether the stream ends with a usage chunk. Raises InvalidRequest."""


class Reply(Protocol):
    """Writes the answers of one endpoint to one call."""

    def chunks(self, delta: Delta) -> Iterator[Json]:
        """The stream chunks for new text of one choice."""

    def last_chunks(self, usage: Usage) -> Iterator[Json]:
        """The stream's last chunks, sent if usage was asked for."""

    def whole(self, choices: Sequence[Delta], usage: Usage) -> Json:
        """The body of an answer that is not streamed."""


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What all answers to one call have in common.

    `created` is in Unix seconds. `fingerprint` names the model's weights, tokenizer and rules; it is empty if unknown.
    """

    id: str
    created: int
    fingerprint: str
    request: GenerationRequest

    @property
    def model(self) -> str:
        """The name of the model."""
        return self.request.model

    @property
    def logprobs(self) -> bool:
        """Whether log probabilities were asked for."""
        return self.request.sampling.logprobs is not None and not self.wants("hidden_logprobs")

    def wants(self, option: str) -> bool:
        """Whether a reply option of the request is set."""
        return bool(self.request.reply_options.get(option))

    def token_name(self, token: TokenLogprob, text: str | None = None) -> str:
        """How a token is shown beside its log probability: by its text, or by its id if the request wants that."""
        if self.wants("tokens_as_ids"):
            return f"token_id:{token.token_id}"
        return token_text(token) if text is None else text

    def body(self, kind: str, choices: list[Json]) -> Json:
        """A body or chunk of the object type `kind`, in OpenAI's form."""
        value: Json = {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
        if self.fingerprint:
            value["system_fingerprint"] = f"fp_{self.fingerprint}"
        if "service_tier" in self.request.reply_options:
            value["service_tier"] = self.request.reply_options["service_tier"]
        if self.wants("null_usage"):  # OpenAI: all chunks before the one with token counts have null
            value["usage"] = None
        return value

    def usage(self, usage: Usage) -> Json:
        """Token counts, with the seconds of each part if the request asked for them."""
        return usage_json(usage, timings=self.wants("timings"))


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint that generates text.

    `parse` raises InvalidRequest. The id of an answer is `id_prefix`, a hyphen and the id of its first job. `names` are
    the client's names of fields that a request has under another name.
    """

    path: str
    parse: Callable[[Mapping[str, Any]], EndpointBody]
    reply: Callable[[ReplyHead], Reply]
    id_prefix: str
    stream_format: StreamFormat = EVENTS
    names: Names = ()

    def parse_call(self, body: Mapping[str, Any], card: ModelCard | None) -> Call:
        """What a body asks for. `card`: of the model, if it is known. Raises InvalidRequest."""
        parsed = self.parse(body)
        return Call(parsed.requests(card), bool(parsed.stream), parsed.wants_usage(), card.digest if card else "")

    def names_in(self, request: GenerationRequest) -> Names:
        """The client's names of the fields of one request. Each prompt of a list has a place there."""
        field = request.reply_options.get("prompt_field")
        return ((r"prompt(_token_ids)?(?!\w)", field), *self.names) if isinstance(field, str) else self.names

    def reply_to(self, request: GenerationRequest, job_id: str, created: int, digest: str) -> Reply:
        """The writer of the answer to `request`.

        `job_id` names its first job; `created` in Unix seconds; `digest` of the model is empty if unknown.
        """
        return self.reply(ReplyHead(f"{self.id_prefix}-{job_id}", created, digest[:SHORT_DIGEST], request))


def usage_json(usage: Usage, *, timings: bool = False) -> Json:
    """Token counts in OpenAI's form. With `timings`, also the seconds that each part took, if they are known."""
    value: Json = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.reasoning_tokens:
        value["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    if timings and usage.timings is not None:
        value["timings"] = {f"{name}_seconds": round(seconds, 6) for name, seconds in asdict(usage.timings).items()}
    return value
