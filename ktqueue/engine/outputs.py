"""Plain data that enters the engine beside a prompt, and that a step returns."""

from dataclasses import dataclass, fields, replace

from ktqueue.core.errors import ErrorInfo
from ktqueue.core.events import FinishReason, PositionLogprobs, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class EmittedChoice:
    """What an earlier worker wrote to the journal for one choice. This worker continues at the next token.

    `text_length`: number of characters in the journal. `finish_reason` is set if the choice had finished.
    """

    token_ids: tuple[int, ...] = ()
    text_length: int = 0
    finish_reason: FinishReason | None = None


@dataclass(slots=True, kw_only=True)
class SequenceOutput:
    """What one step added to one choice of a request.

    `token_ids` are the new ids, including those whose `text` is still held back. `prompt_logprobs` are those of the
    prompt's next tokens; the first token of the prompt has None. A choice finishes with
    `finish_reason` or with `error`. The last output of a request has `request_done` and `usage`. A resumed request
    whose choices had all finished gives one output with only these two.

    Not frozen, because every step makes one for each row while the device waits, and a frozen dataclass takes three
    times as long to make.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs | None, ...] = ()
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None
    request_done: bool = False
    usage: Usage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters and gauges of an engine. `running` and `waiting` count sequences; from `prompt_tokens` on values grow.

    over_share: interactive ones that give their rows to other owners. rows_limit: most rows. rows_wanted: rows that
    batch sequences may fill, as more would not raise the tokens computed in a second. rows_left_out: batch rows
    that the last step left out for interactive sequences. rows_held_by: what keeps batch sequences from more rows:
    `rows` (max_num_seqs), `costs` (more would not raise the tokens of a second), `pages` of the cache, `interactive`
    sequences, or '': nothing. prompt_tokens: computed prompt tokens, including recomputed ones but not cached ones.
    batch_tokens: those of `generation_tokens` that are of the batch class. prefix_queries,
    prefix_hits: tokens looked up in the prefix cache, and found there. out_of_memory: steps that were made smaller
    because the device had too little memory. replayed_steps: steps that replayed a captured graph. prepared_steps:
    steps that were built while the device computed the step before. steps_ahead: those of them that were launched
    before the tokens of the step before were on the host. overlapped_steps: steps of the batch class during which
    interactive sequences had steps of their own. drafted_tokens: tokens that steps verified ahead.
    accepted_tokens: those of them that were right. Seconds are wall time of each part of all steps so far.
    """

    running: int
    waiting: int
    over_share: int
    rows_limit: int
    rows_wanted: int
    rows_left_out: int
    rows_held_by: str
    free_pages: int
    total_pages: int
    prompt_tokens: int
    generation_tokens: int
    batch_tokens: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    out_of_memory: int
    replayed_steps: int
    prepared_steps: int
    steps_ahead: int
    overlapped_steps: int
    drafted_tokens: int
    accepted_tokens: int
    steps: int
    schedule_seconds: float
    forward_seconds: float
    sample_seconds: float
    commit_seconds: float

    def since(self, earlier: "EngineStats") -> "EngineStats":
        """These gauges, and how much each counter has grown since `earlier`."""
        names = [field.name for field in fields(self)]
        counters = names[names.index("prompt_tokens") :]
        return replace(self, **{name: getattr(self, name) - getattr(earlier, name) for name in counters})
