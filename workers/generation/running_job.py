"""RunningJob: a claimed job on this worker: where its journal stands, and what it has used.

Turns engine outputs into journal events. Knows neither Redis nor how tokens are made.
"""

import asyncio
import time

from ktqueue.broker.lease import Claim
from ktqueue.core.errors import ErrorInfo
from ktqueue.core.events import FinishReason, JobState, TokenEvent, Usage
from ktqueue.core.request import GenerationRequest
from ktqueue.engine.outputs import EmittedChoice, SequenceOutput


class RunningJob:
    """One claimed job. Its journal goes on at the number after the last one that an earlier worker wrote."""

    def __init__(self, claim: Claim) -> None:
        self.id = claim.job_id
        self.request: GenerationRequest = claim.request
        self.deadline = claim.deadline  # Unix seconds
        self.rank = claim.rank
        self.futile = claim.futile
        self.moved = asyncio.Event()  # it has said something, or it has ended here
        self.moved_at = time.monotonic()  # when it was claimed, or its engine last said something of it
        self.prompt_token_ids: list[int] = []
        self.ended = False
        self._seq = claim.events[-1].seq if claim.events else 0
        choices = range(claim.request.sampling.n)
        ids: list[list[int]] = [[] for _ in choices]
        text_lengths = [0 for _ in choices]
        finish_reasons: list[FinishReason | None] = [None for _ in choices]
        for event in claim.events:
            ids[event.index].extend(event.token_ids)
            text_lengths[event.index] += len(event.text)
            finish_reasons[event.index] = event.finish_reason or finish_reasons[event.index]
        self.emitted = tuple(
            EmittedChoice(token_ids=tuple(ids[i]), text_length=text_lengths[i], finish_reason=finish_reasons[i])
            for i in choices
        )
        self._open = {i for i in choices if finish_reasons[i] is None}
        self._completion_tokens = sum(len(one) for one in ids)

    @property
    def rows(self) -> int:
        """Rows of the engine that the job still takes: one for each choice that has not ended."""
        return len(self._open)

    @property
    def resumed(self) -> bool:
        """An earlier worker wrote a part of the journal."""
        return any(choice.token_ids or choice.finish_reason for choice in self.emitted)

    def event(self, output: SequenceOutput) -> TokenEvent | None:
        """The next journal event, or None where the output says nothing that a reader could see."""
        self._completion_tokens += len(output.token_ids)
        self.moved_at = time.monotonic()
        if output.error is not None:
            return self.end(JobState.FAILED, output.error, output.usage)
        if output.finish_reason is not None:
            self._open.discard(output.index)
        if not (output.token_ids or output.text or output.finish_reason or output.request_done):
            return None
        self.ended = output.request_done
        return TokenEvent(
            seq=self._next_seq(),
            index=output.index,
            token_ids=output.token_ids,
            text=output.text,
            logprobs=output.logprobs,
            finish_reason=output.finish_reason,
            state=JobState.DONE if output.request_done else None,
            usage=(output.usage or self.usage()) if output.request_done else None,
        )

    def end(self, state: JobState, error: ErrorInfo | None = None, usage: Usage | None = None) -> TokenEvent:
        """The job's last event."""
        self.ended = True
        self._open.clear()
        return TokenEvent(seq=self._next_seq(), state=state, usage=usage or self.usage(), error=error)

    def usage(self) -> Usage:
        """What the job has used up to now, counted over all workers that ran it."""
        return Usage(prompt_tokens=len(self.prompt_token_ids), completion_tokens=self._completion_tokens)

    def let_go(self) -> None:
        """It goes back to the queue."""
        self.ended = True
        self.moved.set()

    def _next_seq(self) -> int:
        self.moved.set()
        self._seq += 1
        return self._seq
