"""The endpoints of OpenAI's API that lines of batches may name, and what each makes of a line's body."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ktqueue.core.errors import ErrorInfo, InvalidRequest
from ktqueue.core.model_card import SHORT_DIGEST, ModelCard
from ktqueue.core.request import GenerationRequest
from ktqueue.openai.client_names import Names, client_names
from ktqueue.openai.endpoint import Endpoint, Reply, ReplyHead
from ktqueue.openai.endpoints import CHAT, COMPLETIONS
from ktqueue.openai.errors import error_body
from ktqueue.openai.responses.body import NAMES, PREFIX, parse_response
from ktqueue.openai.responses.reply import ResponseReply

RESPONSES_PATH = "/v1/responses"


@dataclass(frozen=True, slots=True)
class ParsedLine:
    """A request for each job of a line, the client's names of their fields, and what writes the answer.

    `reply` takes the id of the line's request, the time of its creation in Unix seconds, and the model's digest.
    """

    requests: tuple[GenerationRequest, ...]
    names: Callable[[GenerationRequest], Names]
    reply: Callable[[str, int, str], Reply]


@dataclass(frozen=True, slots=True)
class BatchEndpoint:
    """What lines of one endpoint mean, and the form of their errors. `parse` raises InvalidRequest."""

    parse: Callable[[Mapping[str, Any], ModelCard | None], ParsedLine]
    error_body: Callable[[ErrorInfo], dict[str, Any]] = error_body


def batch_endpoint(endpoint: Endpoint) -> BatchEndpoint:
    """The lines of an endpoint that is served over HTTP."""

    def parse(body: Mapping[str, Any], card: ModelCard | None) -> ParsedLine:
        with client_names(endpoint.names):
            requests = endpoint.parse(body).requests(card)

        def reply(name: str, created: int, digest: str) -> Reply:
            return endpoint.reply_to(requests[0], name, created, digest)

        return ParsedLine(requests, endpoint.names_in, reply)

    return BatchEndpoint(parse, endpoint.stream_format.error_body)


def _parse_response(body: Mapping[str, Any], card: ModelCard | None) -> ParsedLine:
    for name in ("previous_response_id", "background"):
        if body.get(name):
            raise InvalidRequest(f"{name} must be left out in a batch", param=name, limit="left out")
    call = parse_response(body, card)

    def reply(name: str, created: int, digest: str) -> Reply:
        head = ReplyHead(PREFIX + name, created, digest[:SHORT_DIGEST], call.generation)
        return ResponseReply(head, {**call.echo, "store": False})

    return ParsedLine((call.generation,), lambda _: NAMES, reply)


OPENAI_BATCH_ENDPOINTS: Mapping[str, BatchEndpoint] = {
    CHAT.path: batch_endpoint(CHAT),
    COMPLETIONS.path: batch_endpoint(COMPLETIONS),
    RESPONSES_PATH: BatchEndpoint(_parse_response),
}
