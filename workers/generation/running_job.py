"""RunningJob: a claimed job on this worker. It numbers the job's events and counts its tokens.

Turns the engine's outputs into journal events. Knows neither Redis nor how tokens are computed.
"""

import asyncio
import time
from dataclasses import replace
from itertools import chain

from ktqueue.broker.lease import Claim
from ktqueue.core.errors import ErrorInfo
from ktqueue.core.events import FinishReason, JobState, PromptPart, Timings, TokenEvent, Usage
from ktqueue.core.request import GenerationRequest, JobClass
from ktqueue.engine.outputs import EmittedChoice, SequenceOutput
from ktqueue.loading.tokenizer.encoded_prompt import EncodedPrompt

PART_TOKENS = 4096  # of the prompt, in one event
PART_CHARACTERS = 16384
GATHERED_STEPS = 16  # whose tokens of a batch job become one event, while nobody reads it live
GATHERED_SECONDS = 2.0  # after which gathered tokens are written, however few they are


class RunningJob:
    """One claimed job. Its events are numbered from the last event that an earlier worker wrote."""

    def __init__(self, claim: Claim) -> None:
        self.id = claim.job_id
        self.request: GenerationRequest = claim.request
        self.deadline = claim.deadline  # by `time.monotonic()`
        self.rank = claim.rank
        self.owner = claim.owner
        self.deaths_without_progress = claim.deaths_without_progress
        self.progressed = asyncio.Event()  # it has produced an event here, or it left this worker
        self.last_output_at = time.monotonic()  # of the claim, while there is no output
        self.prompt = EncodedPrompt()  # empty until it has been tokenised
        self.waited = claim.waited
        self._claimed_at = self.last_output_at
        self._tokenised_at = self._first_token_at = self._claimed_at
        self.ended = False
        self.gathered_at: float | None = None  # time of the first output that waits in `_gathered`
        self._gathered: list[SequenceOutput] = []
        # Each token of a job whose worker died is written at once, so that its death shows whether it made progress.
        self._gathers = (
            claim.request.job_class is JobClass.BATCH and claim.request.sampling.n == 1 and claim.attempt == 1
        )
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
        written = [event.prompt for event in claim.events if event.prompt is not None]
        self.prompt_entries = sum(len(part.logprobs) for part in written)  # of log probabilities in the journal
        self._written_ids = sum(len(part.token_ids) for part in written)
        self._written_characters = sum(len(part.text) for part in written)
        self._unfinished_choices = {i for i in choices if finish_reasons[i] is None}
        self._has_tokens = False  # from this worker
        self._is_opened = self.resumed  # whether the opening of the answer is in the journal
        self._completion_tokens = sum(len(choice_ids) for choice_ids in ids)

    @property
    def rows(self) -> int:
        """Number of engine rows that the job still takes: one for each unfinished choice, if it generates any."""
        return 0 if self.request.prompt_only else len(self._unfinished_choices)

    @property
    def resumed(self) -> bool:
        """Whether an earlier worker wrote a part of the journal."""
        return any(choice.token_ids or choice.finish_reason for choice in self.emitted)

    def events(self, output: SequenceOutput, now: float, *, followed: bool) -> list[TokenEvent]:
        """The next journal events: none if the output has nothing that a reader could see, or while it is gathered.

        After the first token of a batch job, its tokens are gathered for events of several tokens, unless somebody
        reads it live (`followed`). `now`: `time.monotonic()`.
        """
        self.last_output_at = now
        self._completion_tokens += len(output.token_ids)
        if output.error is not None:
            error = output.error
            if error.param == "grammar":
                error = replace(error, param=self.request.grammar_field)
            return [*self.gathered_events(), self.end(JobState.FAILED, error, output.usage)]
        if output.finish_reason is not None:
            self._unfinished_choices.discard(output.index)
        is_end = output.request_done or output.finish_reason is not None
        if not (output.token_ids or output.text or output.prompt_logprobs or is_end):
            return []
        if self._gathers and self._has_tokens:
            self._gathered.append(output)
            if not followed and not is_end and len(self._gathered) < GATHERED_STEPS:
                self.gathered_at = self.gathered_at or now
                return []
            return self.gathered_events()
        if output.token_ids and not self._has_tokens:
            self._has_tokens, self._first_token_at = True, now
        return [self._event(output)]

    def gathered_events(self) -> list[TokenEvent]:
        """An event with the tokens that were gathered, or no event if there are none."""
        outputs, self._gathered, self.gathered_at = self._gathered, [], None
        if len(outputs) < 2:
            return [self._event(output) for output in outputs]
        last = outputs[-1]
        joined = SequenceOutput(
            request_id=last.request_id,
            index=last.index,
            token_ids=tuple(chain.from_iterable(output.token_ids for output in outputs)),
            text="".join([output.text for output in outputs]),
            logprobs=tuple(chain.from_iterable(output.logprobs for output in outputs)),
            prompt_logprobs=tuple(chain.from_iterable(output.prompt_logprobs for output in outputs)),
            finish_reason=last.finish_reason,
            request_done=last.request_done,
            usage=last.usage,
        )
        return [self._event(joined)]

    def _event(self, output: SequenceOutput) -> TokenEvent:
        self.ended = output.request_done
        opening = ""
        if output.token_ids and not self._is_opened:
            self._is_opened, opening = True, self.prompt.opening
        return TokenEvent(
            seq=self._next_seq(),
            index=output.index,
            token_ids=output.token_ids,
            text=output.text,
            logprobs=output.logprobs,
            prompt=PromptPart(logprobs=output.prompt_logprobs) if output.prompt_logprobs else None,
            finish_reason=output.finish_reason,
            state=JobState.DONE if output.request_done else None,
            usage=self._with_timings(output.usage or self.usage()) if output.request_done else None,
            opening=opening,
        )

    def tokenised(self, prompt: EncodedPrompt) -> None:
        """Take the prompt, now that the tokeniser has made it."""
        self.prompt = prompt
        self._tokenised_at = time.monotonic()

    def prompt_events(self) -> list[TokenEvent]:
        """Events with the prompt's token ids and text, if the request wants them and no earlier worker wrote them."""
        events: list[TokenEvent] = []
        if self.request.return_prompt or self.request.prompt_only:
            ids, text = self.prompt.token_ids[self._written_ids :], self.prompt.text[self._written_characters :]
            pieces = self.prompt.pieces[self._written_ids :]
            parts = max(-(-len(ids) // PART_TOKENS), -(-len(text) // PART_CHARACTERS))
            for number in range(parts):
                tokens = slice(number * PART_TOKENS, (number + 1) * PART_TOKENS)
                part = PromptPart(
                    token_ids=tuple(ids[tokens]),
                    pieces=pieces[tokens],
                    text=text[number * PART_CHARACTERS : (number + 1) * PART_CHARACTERS],
                )
                self._seq += 1  # this is no progress: the prompt may still kill its worker
                events.append(TokenEvent(seq=self._seq, prompt=part))
        return events

    def _with_timings(self, usage: Usage) -> Usage:
        """The usage with the seconds of each part. Of a resumed job, only the queue is that of an earlier worker."""
        timings = Timings(
            queue=self.waited,
            tokenise=self._tokenised_at - self._claimed_at,
            prefill=max(0.0, self._first_token_at - self._tokenised_at),
            decode=self.last_output_at - max(self._first_token_at, self._tokenised_at),
        )
        return replace(usage, timings=timings)

    def end(self, state: JobState, error: ErrorInfo | None = None, usage: Usage | None = None) -> TokenEvent:
        """End the job. Returns its last event."""
        self.ended = True
        self._unfinished_choices.clear()
        return TokenEvent(seq=self._next_seq(), state=state, usage=usage or self.usage(), error=error)

    def usage(self) -> Usage:
        """Tokens of the job up to now, counted over all workers that ran it."""
        return Usage(prompt_tokens=len(self.prompt.token_ids), completion_tokens=self._completion_tokens)

    def release(self) -> None:
        """Mark the job as returned to the queue."""
        self.ended = True
        self.progressed.set()

    def _next_seq(self) -> int:
        self.progressed.set()
        self._seq += 1
        return self._seq
