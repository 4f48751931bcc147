"""The events of a job become a completion."""

import pytest

from ktqueue.core.completion import completion_of
from ktqueue.core.errors import DeadlineExceeded, EngineFailure
from ktqueue.core.events import FinishReason, JobState, PositionLogprobs, PromptPart, TokenEvent, TokenLogprob, Usage


def test_the_events_of_each_choice_are_joined() -> None:
    position = PositionLogprobs(TokenLogprob(5, b"a", -0.5))
    usage = Usage(prompt_tokens=1, completion_tokens=3)
    done = completion_of(
        "j",
        2,
        [
            TokenEvent(seq=1, prompt=PromptPart(token_ids=(3, 5), text="b")),
            TokenEvent(seq=2, prompt=PromptPart(text="a", pieces=(b"b", b"a"), logprobs=(None,))),
            TokenEvent(seq=3, prompt=PromptPart(logprobs=(position,))),
            TokenEvent(seq=4, index=1, token_ids=(7,), text="x"),
            TokenEvent(seq=5, index=0, token_ids=(5,), text="a", logprobs=(position,)),
            TokenEvent(seq=6, index=0, token_ids=(6,), text="", finish_reason=FinishReason.STOP),
            TokenEvent(seq=7, index=1, text="y", finish_reason=FinishReason.LENGTH),
            TokenEvent(seq=8, state=JobState.DONE, usage=usage),
        ],
    )
    assert done.texts == ("a", "xy")
    assert (done.text, done.finish_reason) == ("a", FinishReason.STOP)
    assert done.finish_reasons == (FinishReason.STOP, FinishReason.LENGTH)
    assert done.token_ids == ((5, 6), (7,))
    assert done.logprobs == ((position,), ())
    assert done.usage == usage
    assert done.prompt == PromptPart(token_ids=(3, 5), text="ba", pieces=(b"b", b"a"), logprobs=(None, position))
    assert completion_of("j", 1, [TokenEvent(seq=1, state=JobState.DONE, usage=usage)]).prompt is None


def test_an_end_other_than_done_raises_its_error() -> None:
    late = TokenEvent(seq=1, state=JobState.EXPIRED, error=DeadlineExceeded("late").info())
    with pytest.raises(DeadlineExceeded, match="late"):
        completion_of("j", 1, [late])
    with pytest.raises(EngineFailure, match="failed"):
        completion_of("j", 1, [TokenEvent(seq=1, state=JobState.FAILED)])
