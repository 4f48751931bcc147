"""One choice of one request as the engine sees it: its tokens, its pages, where it stands.

Knows nothing of who runs when, of tensors, or of how tokens are chosen.
"""

from collections.abc import Sequence as Many
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from ktqueue.core.events import FinishReason
from ktqueue.core.request import JobClass, SamplingParams
from ktqueue.engine.detokenizer import Detokenizer
from ktqueue.engine.logit_edits import LogitEdits
from ktqueue.engine.noise import stream
from ktqueue.engine.pages import page_digest

_ROOT = b""


class Status(Enum):
    """Where a sequence stands. FORKING: new, or it waits for a sibling to compute the prompt that they share."""

    WAITING = 1
    FORKING = 2
    RUNNING = 3
    FINISHED = 4


class Request:
    """What the choices of one request share. `seed` is resolved; `serial` breaks ties of `arrival` (seconds)."""

    __slots__ = (
        "arrival",
        "cached_tokens",
        "emitted_tokens",
        "end_ids",
        "id",
        "job_class",
        "max_tokens",
        "open",
        "prompt",
        "sampling",
        "seed",
        "sequences",
        "serial",
    )

    def __init__(
        self,
        request_id: str,
        prompt: NDArray[np.int32],
        sampling: SamplingParams,
        *,
        job_class: JobClass,
        arrival: float,
        serial: int,
        seed: int,
        max_tokens: int,
        end_ids: frozenset[int],
    ) -> None:
        self.id = request_id
        self.prompt = prompt
        self.sampling = sampling
        self.job_class = job_class
        self.arrival = arrival
        self.serial = serial
        self.seed = seed
        self.max_tokens = max_tokens  # per choice, bounded by the context
        self.end_ids = end_ids  # stop ids, and end-of-text ids unless ignored
        self.sequences: list[Sequence] = []  # those that were unfinished when the request came
        self.open = 0  # choices that have not ended
        self.emitted_tokens = 0  # of choices that had ended before the request came here
        self.cached_tokens: int | None = None  # None until the first lookup

    @property
    def completion_tokens(self) -> int:
        """Generated tokens of all choices, those of earlier workers included."""
        return self.emitted_tokens + sum(one.generated for one in self.sequences)


class Sequence:
    """Tokens [0, computed) have their keys and values in `pages[:page_count]`; the rest is to be computed."""

    __slots__ = (
        "computed",
        "detokenizer",
        "digests",
        "edits",
        "forks",
        "generated",
        "index",
        "length",
        "named",
        "page_count",
        "pages",
        "request",
        "resumed_text",
        "status",
        "stream",
        "tokens",
    )

    def __init__(
        self,
        request: Request,
        index: int,
        detokenizer: Detokenizer,
        edits: LogitEdits | None,
        page_size: int,
    ) -> None:
        capacity = len(request.prompt) + request.max_tokens
        self.request = request
        self.index = index
        self.detokenizer = detokenizer
        self.edits = edits
        self.stream = stream(request.seed, index)
        self.tokens = np.empty(capacity, dtype=np.int32)
        self.tokens[: len(request.prompt)] = request.prompt
        self.length = len(request.prompt)  # tokens known
        self.generated = 0
        self.computed = 0
        self.pages = np.zeros(-(-capacity // page_size), dtype=np.int32)
        self.page_count = 0
        self.digests: list[bytes] = []  # names of the full pages of tokens[:length], as far as asked for
        self.named = 0  # pages whose name was registered or taken from the cache
        self.forks: list[Sequence] = []  # siblings that wait for this one's prompt
        self.status = Status.FORKING
        self.resumed_text = ""  # decided from journaled ids, but not journaled as text

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled; 1 when decoding."""
        return self.length - self.computed

    @property
    def ends_next(self) -> bool:
        """Whether the next token is the last that it may have."""
        return self.generated + 1 >= self.request.max_tokens

    def append(self, token_id: int) -> None:
        """One more generated token."""
        self.tokens[self.length] = token_id
        self.length += 1
        self.generated += 1
        if self.edits is not None:
            self.edits.observe(token_id)

    def advance(self, token_id: int) -> tuple[str, FinishReason | None]:
        """Append a generated token; the text that it decides, and whether the choice has ended by it."""
        request = self.request
        self.append(token_id)
        finish: FinishReason | None = None
        if token_id in request.end_ids:
            text = ""
            finish = FinishReason.STOP
        else:
            text = self.detokenizer.push(token_id, may_stop=self.generated > request.sampling.min_tokens)
            if self.detokenizer.stopped:
                return text, FinishReason.STOP
            if self.generated >= request.max_tokens:
                finish = FinishReason.LENGTH
        if finish is not None:
            text += self.detokenizer.finish()
            if self.detokenizer.stopped:
                finish = FinishReason.STOP
        return text, finish

    def resume(self, token_ids: Many[int], text_length: int) -> FinishReason | None:
        """Take up ids that were journaled with `text_length` characters; whether the choice has ended by them."""
        finish = None
        text = []
        for token_id in token_ids:
            piece, finish = self.advance(token_id)
            text.append(piece)
            if finish is not None:
                break
        self.resumed_text = "".join(text)[text_length:]
        return finish

    def page_digests(self, pages: int, page_size: int) -> list[bytes]:
        """Names of the first `pages` full pages."""
        digests = self.digests
        while len(digests) < pages:
            start = len(digests) * page_size
            parent = digests[-1] if digests else _ROOT
            digests.append(page_digest(parent, self.tokens[start : start + page_size]))
        return digests[:pages]
