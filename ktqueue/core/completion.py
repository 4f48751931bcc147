"""Completion: the whole answer of a job, assembled from its events."""

from collections.abc import Iterable
from dataclasses import dataclass

from ktqueue.core.errors import EngineFailure, error_of
from ktqueue.core.events import FinishReason, JobState, PositionLogprobs, TokenEvent, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What a job has generated. Tuples have an entry for each of the `n` choices, in order of index."""

    job_id: str
    texts: tuple[str, ...]
    finish_reasons: tuple[FinishReason | None, ...]
    token_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[PositionLogprobs, ...], ...]
    usage: Usage | None

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.texts[0]

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first choice ended."""
        return self.finish_reasons[0]


def completion_of(job_id: str, choices: int, events: Iterable[TokenEvent]) -> Completion:
    """Assemble the answer from all events of a job that has ended.

    Raises the error with which the job ended (Cancelled, DeadlineExceeded, PoisonJob, EngineFailure ...).
    """
    texts = [""] * choices
    reasons: list[FinishReason | None] = [None] * choices
    token_ids: list[list[int]] = [[] for _ in range(choices)]
    logprobs: list[list[PositionLogprobs]] = [[] for _ in range(choices)]
    usage = None
    for event in events:
        texts[event.index] += event.text
        token_ids[event.index] += event.token_ids
        logprobs[event.index] += event.logprobs
        reasons[event.index] = event.finish_reason or reasons[event.index]
        if event.state is not None:
            usage = event.usage
            if event.state is not JobState.DONE:
                raise error_of(event.error) if event.error else EngineFailure(f"job {job_id} ended {event.state}")
    return Completion(
        job_id=job_id,
        texts=tuple(texts),
        finish_reasons=tuple(reasons),
        token_ids=tuple(map(tuple, token_ids)),
        logprobs=tuple(map(tuple, logprobs)),
        usage=usage,
    )
