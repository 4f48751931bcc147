"""The requests of an engine by id, and the outputs that report about their choices."""

from collections.abc import Callable

from ktqueue.answers.grammar_errors import GrammarFailed
from ktqueue.core.errors import EngineFailure, InvalidRequest, KtqueueError
from ktqueue.core.events import FinishReason, PositionLogprobs, Usage
from ktqueue.engine.logprobs import forced_logprobs
from ktqueue.engine.outputs import SequenceOutput
from ktqueue.engine.sequence import Request, Sequence, SequenceStatus


class RequestTable:
    """Requests with choices that have not finished. `remove_sequence` is called for each choice that ends.

    `token_bytes` gives the bytes of a token for log probabilities. `least_jump`: see EngineParts.
    """

    def __init__(
        self, remove_sequence: Callable[[Sequence], None], token_bytes: Callable[[int], bytes], least_jump: int
    ) -> None:
        self._least_jump = least_jump
        self._token_bytes = token_bytes
        self._remove_sequence = remove_sequence
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def check_is_new(self, request_id: str) -> None:
        """Raise InvalidRequest if there is a request with this id."""
        if request_id in self._requests:
            raise InvalidRequest(
                f"request {request_id!r} is already in the engine", param="request_id", value=request_id
            )

    def add(self, request: Request) -> None:
        """Add a request with at least one choice that has not finished."""
        self._requests[request.id] = request

    def abort(self, request_id: str) -> None:
        """Remove a request and its choices. An unknown id is ignored."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            for sequence in request.sequences:
                self._remove(sequence)

    def advance(self, sequence: Sequence, token_id: int, logprobs: PositionLogprobs | None) -> SequenceOutput:
        """Add a generated token to a choice, and the tokens that its grammar forces after it. Report them.

        If the grammar fails, the choice ends with that error.
        """
        try:
            token_ids, text, finish = sequence.advance_and_jump(token_id, self._least_jump)
        except GrammarFailed as fault:
            return self.fail(sequence, fault)
        if logprobs is None:
            return self.output(sequence, token_ids, text, finish)
        alternatives = sequence.request.sampling.logprobs or 0
        forced = (forced_logprobs(token_id, alternatives, self._token_bytes) for token_id in token_ids[1:])
        return self.output(sequence, token_ids, text, finish, (logprobs, *forced))

    def output(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        text: str,
        finish: FinishReason | None,
        logprobs: tuple[PositionLogprobs, ...] = (),
    ) -> SequenceOutput:
        """Report new tokens of a choice, and end it if it has finished."""
        if sequence.resumed_text:
            text = sequence.resumed_text + text
            sequence.resumed_text = ""
        request = sequence.request
        done = finish is not None and self._end(sequence)
        return SequenceOutput(
            request_id=request.id,
            index=sequence.index,
            token_ids=token_ids,
            text=text,
            logprobs=logprobs,
            finish_reason=finish,
            request_done=done,
            usage=usage_of(request) if done else None,
        )

    def fail(self, sequence: Sequence, fault: KtqueueError) -> SequenceOutput:
        """End a choice with an error, and report it."""
        request = sequence.request
        done = self._end(sequence)
        return SequenceOutput(
            request_id=request.id,
            index=sequence.index,
            error=fault.info(),
            request_done=done,
            usage=usage_of(request) if done else None,
        )

    def fail_all(self, request: Request, fault: KtqueueError) -> list[SequenceOutput]:
        """End all choices of a request that have not finished with the same error."""
        return [
            self.fail(sequence, fault)
            for sequence in request.sequences
            if sequence.status is not SequenceStatus.FINISHED
        ]

    def _remove(self, sequence: Sequence) -> None:
        self._remove_sequence(sequence)
        sequence.matcher = None  # it may be large, and a request and its choices refer to each other

    def _end(self, sequence: Sequence) -> bool:
        """Remove a choice. Returns whether its request is done."""
        request = sequence.request
        self._remove(sequence)
        request.unfinished -= 1
        if request.unfinished:
            return False
        del self._requests[request.id]
        return True


def no_token(sequence: Sequence) -> KtqueueError:
    """The error of a sequence for which no token can be chosen."""
    if sequence.constraints_allow_nothing:
        return InvalidRequest("the grammar, bad_words and allowed_token_ids together allow no token", param="grammar")
    return EngineFailure("the model computed logits that are not finite numbers for this sequence")


def usage_of(request: Request) -> Usage:
    """Token counts of a request up to now."""
    return Usage(
        prompt_tokens=len(request.prompt),
        completion_tokens=request.completion_tokens,
        cached_tokens=request.cached_tokens or 0,
    )
