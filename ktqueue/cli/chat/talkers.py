"""Who answers in `ktqueue chat`: a gateway over HTTP, workers through Redis, or an engine in this process.

A talker's `answer` is a generator of pieces. Ctrl-C during an answer stops only that answer (cancels its job, frees its
pages) and raises KeyboardInterrupt.
"""

import json
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ktqueue.cli.connection import listed_models, one_model
from ktqueue.core.errors import KtqueueError
from ktqueue.core.request import GenerationRequest, SamplingParams
from ktqueue.profiling.token_log import TokenLog

if TYPE_CHECKING:
    from ktqueue.client import SyncClient
    from ktqueue.core.config import Config
    from ktqueue.engine.engine import Engine
    from ktqueue.engine.outputs import SequenceOutput
    from ktqueue.loading.tokenizer.tokenizer import Tokenizer
    from ktqueue.profiling.writer import RecordWriter
    from ktqueue.workers.startup.routing_file import RoutingFile

Message = Mapping[str, Any]


class Piece(NamedTuple):
    """Part of an answer: some text, and the number of tokens reported with it."""

    text: str
    tokens: int


class Talker(Protocol):
    """Answers a conversation. `model` is the name of its model."""

    model: str

    def answer(self, messages: Sequence[Message], sampling: SamplingParams) -> Iterator[Piece]:
        """Generate the next turn of the assistant in pieces. Raises KtqueueError, KeyboardInterrupt."""

    def close(self) -> None:
        """Release its resources."""


class HttpTalker:
    """Answers through any OpenAI-compatible gateway."""

    def __init__(self, base_url: str, model: str | None, api_key: str | None) -> None:
        """`base_url` is that of the openai client, with or without /v1. Raises Unavailable."""
        from ktqueue.cli.http_client import connect

        self._client = connect(base_url, api_key)
        self.model = model or self._only_model()

    def _only_model(self) -> str:
        from ktqueue.cli.http_client import answered, check

        with answered(self._client, ValueError, KeyError, TypeError):
            response = self._client.get("/v1/models")
            check(response)
            served = listed_models(response.json()["data"])
        return one_model(served)

    def answer(self, messages: Sequence[Message], sampling: SamplingParams) -> Iterator[Piece]:
        from ktqueue.cli.http_client import answered, check

        body: dict[str, Any] = {"model": self.model, "messages": list(messages), "stream": True}
        body["stream_options"] = {"include_usage": True}
        defaults = asdict(SamplingParams())
        body |= {name: value for name, value in asdict(sampling).items() if value != defaults[name]}
        stream = self._client.stream("POST", "/v1/chat/completions", json=body)
        with answered(self._client), stream as response:
            if response.is_error:
                response.read()
            check(response)
            for line in response.iter_lines():
                document = stream_document(line)
                for choice in document.get("choices", ()):
                    if text := choice["delta"].get("content"):
                        yield Piece(text, 0)
                if usage := document.get("usage"):
                    yield Piece("", usage["completion_tokens"])

    def close(self) -> None:
        self._client.close()


class RedisTalker:
    """Answers through Redis and its workers."""

    def __init__(self, client: "SyncClient", model: str) -> None:
        self._client = client
        self.model = model

    def answer(self, messages: Sequence[Message], sampling: SamplingParams) -> Iterator[Piece]:
        request = GenerationRequest(model=self.model, messages=tuple(messages), sampling=sampling)
        job = self._client.submit(request)
        ended = False
        try:
            for event in self._client.stream(job.id):
                ended = event.state is not None
                if event.error is not None:
                    raise KtqueueError(event.error.message)
                yield Piece(event.text, len(event.token_ids))
        finally:
            if not ended:
                self._client.cancel(job.id)

    def close(self) -> None:
        self._client.close()


class LocalTalker:
    """Answers with an engine in this process, without Redis."""

    def __init__(
        self,
        engine: "Engine",
        tokenizer: "Tokenizer",
        model: str,
        profile: "RecordWriter | None" = None,
        routing: "RoutingFile | None" = None,
    ) -> None:
        """`profile` and `routing` are closed with the talker."""
        self._routing = routing
        self._engine = engine
        self._tokenizer = tokenizer
        self._profile = profile
        self._tokens = TokenLog(profile) if profile is not None else None
        self._turn = 0
        self.model = model

    def answer(self, messages: Sequence[Message], sampling: SamplingParams) -> Iterator[Piece]:
        """See Talker. Ctrl-C waits for the end of the step, so that the engine stays consistent."""
        self._turn += 1
        request_id = f"turn-{self._turn}"
        request = GenerationRequest(model=self.model, messages=tuple(messages), sampling=sampling)
        interrupted = False

        def note(number: int, frame: object) -> None:
            nonlocal interrupted
            interrupted = True

        before = signal.signal(signal.SIGINT, note)
        try:
            if self._tokens is not None:
                self._tokens.claimed(request_id, time.monotonic(), waited=0.0, positions=[0] * sampling.n)
                self._tokens.tokenising(request_id, time.monotonic())
            prompt = self._tokenizer.encode_request(request).token_ids
            if self._tokens is not None:
                self._tokens.tokenised(request_id, time.monotonic())
                self._tokens.added(request_id, time.monotonic())
            self._engine.add(request_id, prompt, sampling)
            while self._engine.has_work and not interrupted:
                outputs = self._engine.step()
                received = time.monotonic()
                for output in outputs:
                    if output.error is not None:
                        raise KtqueueError(output.error.message)
                    yield Piece(output.text, len(output.token_ids))
                if self._tokens is not None:
                    self._note(self._tokens, outputs, received)
        finally:
            self._engine.abort(request_id)
            if self._tokens is not None:
                self._tokens.ended(request_id)
            signal.signal(signal.SIGINT, before)
        if interrupted:
            raise KeyboardInterrupt

    def _note(self, tokens: TokenLog, outputs: "Sequence[SequenceOutput]", received: float) -> None:
        """Note the tokens of a step, which are on the terminal now."""
        record = self._engine.recorder.take() if self._engine.recorder is not None else None
        if record is None:
            return
        for output in outputs:
            tokens.token(record, output.request_id, output.index, len(output.token_ids), received)
            tokens.publish(output.request_id)
        tokens.published()(time.monotonic())

    def close(self) -> None:
        for record in (self._profile, self._routing):
            if record is not None:
                record.close()


def local_talker(config: "Config") -> LocalTalker:
    """Load the model with a progress bar, and make its talker."""
    from ktqueue.cli.terminal.progress import Bar
    from ktqueue.profiling.writer import prepare_folder
    from ktqueue.workers.startup.build import build
    from ktqueue.workers.startup.profile import start_profile
    from ktqueue.workers.startup.routing_file import start_routing

    prepare_folder(config.profile)
    with Bar("loading", in_bytes=True) as bar:
        built = build(config.engine, bar.update, named_ranges=config.profile.folder is not None)
    routing = start_routing(config.engine, built.model, built.engine)
    profile = start_profile(config.profile, built, "chat")
    return LocalTalker(built.engine, built.tokenizer, built.card.name, profile, routing)


def stream_document(line: str) -> dict[str, Any]:
    """Return the JSON document in a line of a server-sent event stream, {} if there is none.

    Raises KtqueueError if the document is an error.
    """
    data = line[5:].strip() if line.startswith("data:") else ""
    if data in ("", "[DONE]"):
        return {}
    document: dict[str, Any] = json.loads(data)
    if document.get("error"):
        raise KtqueueError(str(document["error"].get("message")))
    return document
