"""Times one request for the metrics: first token, between tokens, whole. Knows no HTTP and no JSON."""

import time

from ktqueue.core.errors import KtqueueError
from ktqueue.core.events import TokenEvent
from ktqueue.gateway.feed import Batch
from ktqueue.gateway.metrics import Metrics


class Stopwatch:
    """Starts when it is made, right after the submission. Without metrics it counts nothing."""

    def __init__(self, metrics: Metrics | None, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self._begun = time.monotonic()
        self._last: float | None = None

    def saw(self, batch: Batch) -> None:
        """Events arrived just now."""
        if self._metrics is None:
            return
        now = time.monotonic()
        for _, event in batch:
            if event.finish_reason is not None:
                self._metrics.success.labels(self._model, event.finish_reason.value).inc()
        if any(event.token_ids for _, event in batch):
            if self._last is None:
                self._metrics.first_token.labels(self._model).observe(now - self._begun)
            else:
                self._metrics.inter_token.labels(self._model).observe(now - self._last)
            self._last = now

    def done(self, event: TokenEvent) -> None:
        """A job is done; `event` is its last."""
        if self._metrics is None:
            return
        self._metrics.end_to_end.labels(self._model).observe(time.monotonic() - self._begun)
        if event.usage is not None:
            self._metrics.prompt_tokens.labels(self._model).observe(event.usage.prompt_tokens)
            self._metrics.generation_tokens.labels(self._model).observe(event.usage.completion_tokens)

    def failed(self, error: KtqueueError) -> None:
        """The request ends in an error."""
        if self._metrics is None:
            return
        self._metrics.failed(self._model, error.info().code)
