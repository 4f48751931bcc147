"""The whole answer of a job and its prompt, assembled from its events."""

from collections.abc import Iterable
from dataclasses import dataclass

from ktqueue.core.errors import EngineFailure, error_of
from ktqueue.core.events import FinishReason, JobState, PositionLogprobs, PromptPart, TokenEvent, Usage


class JoinedPrompt:
    """The prompt of a job, which its events have in parts."""

    def __init__(self) -> None:
        self._parts: list[PromptPart] = []

    def add(self, part: PromptPart) -> None:
        """Add the next part."""
        self._parts.append(part)

    def whole(self) -> PromptPart | None:
        """All parts as one, or None if there are none."""
        if len(self._parts) > 1:
            token_ids = [token_id for part in self._parts for token_id in part.token_ids]
            logprobs = [entry for part in self._parts for entry in part.logprobs]
            pieces = [piece for part in self._parts for piece in part.pieces]
            text = "".join(part.text for part in self._parts)
            whole = PromptPart(token_ids=tuple(token_ids), text=text, pieces=tuple(pieces), logprobs=tuple(logprobs))
            self._parts = [whole]
        return self._parts[0] if self._parts else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What a job has generated. Tuples have an entry for each of the `n` choices, in order of index.

    `prompt` has the parts of the prompt that the request asked for; None if it asked for none.
    """

    job_id: str
    texts: tuple[str, ...]
    finish_reasons: tuple[FinishReason | None, ...]
    token_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[PositionLogprobs, ...], ...]
    usage: Usage | None
    prompt: PromptPart | None = None

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
    prompt = JoinedPrompt()
    for event in events:
        if event.prompt is not None:
            prompt.add(event.prompt)
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
        prompt=prompt.whole(),
    )
