"""Events of a job: new tokens, why a choice finished, token counts and the job's state."""

from dataclasses import dataclass
from enum import StrEnum

from ktqueue.core.errors import ErrorInfo


class JobState(StrEnum):
    """State of a job. The last four are terminal: a job ends in exactly one of them."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def terminal(self) -> bool:
        """Whether the job has ended."""
        return self not in (JobState.QUEUED, JobState.RUNNING)


class FinishReason(StrEnum):
    """Why a choice finished: an end token or stop string, or a length limit."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token and its natural-log probability (<= 0). `token_bytes` are the bytes of its text."""

    token_id: int
    token_bytes: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The chosen token of a position, and the `top_logprobs` likeliest tokens, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds that a job spent in each part: waiting in the queue, tokenising, computing its prompt, and decoding."""

    queue: float
    tokenise: float
    prefill: float
    decode: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a job: the prompt once, completions summed over all choices.

    `reasoning_tokens` are part of the completions; only readers of the answer count them. `timings`: None if unknown.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    timings: Timings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPart:
    """A part of the prompt as the model reads it: token ids, text, and bytes and log probabilities of the tokens.

    Each field is present only if the request asked for it. Joined over all parts of a job, it is complete: `token_ids`,
    `pieces` and `logprobs` have an entry for each token, `text` is the whole text. They may be in different parts. The
    first token of a prompt has no log probability, but None.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    pieces: tuple[bytes, ...] = ()
    logprobs: tuple[PositionLogprobs | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """One entry of a job's journal.

    `seq` counts the job's events from 1 without gaps. `index` is the choice (0..n-1).
    `token_ids` are all ids generated since the choice's last event, including those whose `text` is
    held back (half a character, a possible stop string). `finish_reason` is set on the last
    event of a choice; `state` on the last event of the job, with `usage` (and `error` unless done).
    `prompt` is set in events before the first token, if the request asked for its prompt.
    `opening` is the beginning of the answer that the prompt already contains, such as `<think>`. It is set in the first
    event of the job that has tokens, and is not part of `text`.
    `format` is set if a newer version wrote the event; then only `seq` could be read.
    """

    seq: int
    index: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    state: JobState | None = None
    usage: Usage | None = None
    error: ErrorInfo | None = None
    prompt: PromptPart | None = None
    opening: str = ""
    format: int | None = None
