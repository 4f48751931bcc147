"""What goes into the engine beside a prompt, and what comes out of a step. Plain data."""

from dataclasses import dataclass

from ktqueue.core.errors import ErrorInfo
from ktqueue.core.events import FinishReason, PositionLogprobs, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class EmittedChoice:
    """What an earlier worker journaled of one choice, so that this one goes on at the next token.

    `text_length` is the number of characters that were journaled; `finish_reason` is set when the
    choice had ended already.
    """

    token_ids: tuple[int, ...] = ()
    text_length: int = 0
    finish_reason: FinishReason | None = None


@dataclass(slots=True, kw_only=True)
class SequenceOutput:
    """News of one choice of one request.

    `token_ids` are new ids, also those whose `text` is still held back. A choice ends with
    `finish_reason` or with `error`; the request's last output has `request_done` and `usage`.
    A resumed request whose choices had all ended gives one output with `request_done` alone. Not frozen: one is made a
    row a step while the device waits, and a frozen one takes three times as long to make.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None
    request_done: bool = False
    usage: Usage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot. `running` and `waiting` count sequences; the rest from `prompt_tokens` on only grows.

    `prompt_tokens` are computed (not cached) prompt tokens, recomputed ones included;
    `prefix_queries` and `prefix_hits` are tokens looked up in, and served from, the prefix cache.
    `out_of_memory` counts the steps that were made smaller because the device had no memory for them, `replayed_steps`
    those that replayed a captured graph, `prepared_steps` those that were made while the device was at the one before.
    Seconds are wall time spent in each part of all steps so far.
    """

    running: int
    waiting: int
    free_pages: int
    total_pages: int
    prompt_tokens: int
    generation_tokens: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    out_of_memory: int
    replayed_steps: int
    prepared_steps: int
    steps: int
    schedule_seconds: float
    forward_seconds: float
    sample_seconds: float
    commit_seconds: float
