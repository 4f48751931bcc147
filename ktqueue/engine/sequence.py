"""Requests and sequences. A sequence is one choice of a request: its tokens, its pages and its text so far.

Knows nothing of scheduling, of tensors or of sampling.
"""

from collections.abc import Sequence as Many
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from ktqueue.answers.grammar import Matcher
from ktqueue.core.events import FinishReason
from ktqueue.core.request import JobClass, SamplingParams
from ktqueue.core.tenants import DEFAULT_TENANT, NOBODY, Owner
from ktqueue.engine.detokenizer import Detokenizer
from ktqueue.engine.logit_edits import LogitEdits
from ktqueue.engine.lookup import Lookup
from ktqueue.engine.noise import stream
from ktqueue.engine.pages import page_digest
from ktqueue.engine.sampler import GREEDY_BELOW

_ROOTS = {False: b"", True: b"rotated for long sequences"}
_NO_POSITIONS = range(0)
NO_SLOT = -1
"""In place of a slot of `States`: a sequence without tokens, or without a planned step."""


@dataclass(slots=True)
class DraftProgress:
    """What the draft model has in the pages of one sequence: `computed` known tokens, then the drafts `ahead`.

    rate: how often its drafts are right after right ones.
    """

    rate: float
    computed: int = 0
    ahead: list[int] = field(default_factory=list)


class SequenceStatus(Enum):
    """State of a sequence. FORKING: it is new, or waits for a sibling that computes the prompt for both."""

    WAITING = 1
    FORKING = 2
    RUNNING = 3
    FINISHED = 4


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """What the choices of one request share.

    `arrival` is in seconds; `serial` counts admitted requests and breaks ties. `seed` is never None here.
    """

    id: str
    prompt: NDArray[np.int32]
    sampling: SamplingParams
    _: KW_ONLY
    job_class: JobClass
    arrival: float
    serial: int
    seed: int
    max_tokens: int  # of each choice, limited by the context length
    end_ids: frozenset[int]  # stop ids, and the end-of-text ids unless the request ignores them
    owner: Owner = NOBODY
    sequences: "list[Sequence]" = field(default_factory=list)  # choices that were not finished when the request arrived
    unfinished: int = 0  # number of choices that have not finished
    emitted_tokens: int = 0  # of choices that had finished before the request arrived
    prompt_entries: int = 0  # prompt tokens whose log probabilities are known to the client, if it wants them
    cached_tokens: int | None = None  # None until the first lookup in the prefix cache

    @property
    def completion_tokens(self) -> int:
        """Number of generated tokens of all choices, including those of earlier workers."""
        return self.emitted_tokens + sum(sequence.generated for sequence in self.sequences)


class Sequence:
    """One choice of a request.

    The keys and values of tokens [0, num_computed_tokens) are in `pages[:page_count]`. The tokens from there to
    `length` are known, but not computed.
    """

    def __init__(
        self,
        request: Request,
        index: int,
        detokenizer: Detokenizer,
        edits: LogitEdits | None,
        page_size: int,
        matcher: Matcher | None = None,
        original_length: int = 0,
    ) -> None:
        capacity = len(request.prompt) + request.max_tokens
        self.request = request
        self.index = index
        self.order = request.arrival, request.serial, index  # the lowest goes first among sequences of equal rank
        self.detokenizer = detokenizer
        self.edits = edits
        self.lookup: Lookup | None = None  # made when the sequence may have drafts
        self.draft_progress: DraftProgress | None = None  # in the cache of a draft model, while it has pages
        self.matcher = matcher  # follows the answer through its grammar, if it has one
        self.expects_likeliest = _expects_likeliest(request.sampling, edits)
        self.masks_in_advance = 0  # steps whose mask is computed before the likeliest token is known: see TokenMasks
        self.noise_stream = stream(request.seed, index)
        self.tokens = np.empty(capacity, dtype=np.int32)
        self.tokens[: len(request.prompt)] = request.prompt
        self.length = len(request.prompt)  # number of known tokens
        self.generated = 0
        self.num_computed_tokens = 0
        self.pages = np.zeros(-(-capacity // page_size), dtype=np.int32)
        self.page_count = 0
        self.known_digests: list[bytes] = []  # digests of full pages of tokens[:length], computed so far
        self.original_length = original_length  # see KVLayout
        self.rotary_offset = 0  # which its positions have in a batch: see RotaryByLength
        self.registered_pages = 0  # pages that were registered in the prefix cache, or found there
        self.forks: list[Sequence] = []  # siblings that wait for the prompt, which this sequence computes
        self.state = self.next_state = NO_SLOT  # slots before and after the planned step, if the model has states
        self.draft_states: list[int] = []  # slots after each draft of that step
        self.status = SequenceStatus.FORKING
        self.resumed_text = ""  # text of journaled token ids that is not in the journal yet

    @property
    def remaining(self) -> int:
        """Number of tokens to compute before the next one can be sampled; 1 when decoding."""
        return self.length - self.num_computed_tokens

    @property
    def is_unfinished(self) -> bool:
        """Whether the sequence has not ended, as by an error in this step."""
        return self.status is not SequenceStatus.FINISHED

    @property
    def samples(self) -> bool:
        """Whether the request wants any tokens. If not, it ends with its prompt."""
        return self.request.max_tokens > 0

    @property
    def needed_offset(self) -> int:
        """The `rotary_offset` of a sequence of this length."""
        return self.original_length if self.length > self.original_length else 0

    def set_angles(self) -> None:
        """Give a sequence without pages the rotary angles of its length."""
        if self.rotary_offset != self.needed_offset:
            self.rotary_offset = self.needed_offset
            self.known_digests = []

    def scored_positions(self, count: int) -> range:
        """Positions among the next `count` tokens whose logits give a prompt token's log probability.

        Those that were given before, by an earlier worker or before a preemption, are not computed again.
        """
        request, first = self.request, self.num_computed_tokens
        if request.sampling.prompt_logprobs is None:
            return _NO_POSITIONS
        start = max(first, request.prompt_entries - 1)
        return range(start, max(start, min(first + count, len(request.prompt) - 1)))

    @property
    def ends_next(self) -> bool:
        """Whether the next token is the last one that `max_tokens` allows."""
        return self.generated + 1 >= self.request.max_tokens

    def append(self, token_id: int) -> None:
        """Add a generated token. Raises GrammarFailed."""
        self.tokens[self.length] = token_id
        self.length += 1
        self.generated += 1
        if self.edits is not None:
            self.edits.observe(token_id)
        if self.matcher is not None:
            self.matcher.consume(token_id)

    def advance(self, token_id: int) -> tuple[str, FinishReason | None]:
        """Add a generated token. Returns the text that is certain now, and the reason if the choice has finished.

        A choice with a grammar finishes also when the grammar allows nothing more. Raises GrammarFailed.
        """
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
            if self.matcher is not None and self.matcher.is_complete:
                finish = FinishReason.STOP
            elif self.generated >= request.max_tokens:
                finish = FinishReason.LENGTH
        if finish is not None:
            text += self.detokenizer.finish()
            if self.detokenizer.stopped:
                finish = FinishReason.STOP
        return text, finish

    def advance_and_jump(self, token_id: int, least_jump: int) -> tuple[tuple[int, ...], str, FinishReason | None]:
        """Add a generated token, and the tokens that the grammar forces after it, if these are at least `least_jump`.

        Returns the tokens, and what `advance` returns.

        The forced tokens belong to the event of the token, so a resumed choice never begins between them.
        """
        text, finish = self.advance(token_id)
        if self.matcher is None or finish is not None:
            return (token_id,), text, finish
        token_ids, jump = [token_id], self.matcher.forced_tokens()
        for forced in jump if len(jump) >= least_jump else ():
            piece, finish = self.advance(forced)
            text += piece
            token_ids.append(forced)
            if finish is not None:
                break
        return tuple(token_ids), text, finish

    def resume(self, token_ids: Many[int], text_length: int) -> FinishReason | None:
        """Add token ids from the journal, whose text there has `text_length` characters.

        Returns the finish reason if the choice finishes with them. Raises GrammarFailed.
        """
        finish = None
        text = []
        for token_id in token_ids:
            piece, finish = self.advance(token_id)
            text.append(piece)
            if finish is not None:
                break
        self.resumed_text = "".join(text)[text_length:]
        return finish

    @property
    def constraints_allow_nothing(self) -> bool:
        """Whether the grammar and the edits of the logits leave no next token."""
        if self.matcher is None or self.edits is None:
            return False
        mask = np.frombuffer(self.matcher.mask(), np.uint8)
        allowed = np.setdiff1d(np.flatnonzero(np.unpackbits(mask, bitorder="little")), self.edits.masked_ids)
        return not (np.intersect1d(allowed, self.edits.allowed_ids) if self.edits.allowed_ids.size else allowed).size

    def page_digests(self, pages: int, page_size: int) -> list[bytes]:
        """Digests of the first `pages` full pages."""
        digests = self.known_digests
        while len(digests) < pages:
            start = len(digests) * page_size
            parent = digests[-1] if digests else _root(self.rotary_offset > 0, self.request.owner.tenant)
            digests.append(page_digest(parent, self.tokens[start : start + page_size]))
        return digests[:pages]


def _root(is_rotated: bool, tenant: str) -> bytes:
    """What the digest of a first page follows. Each tenant has its own, so its pages are found by nobody else."""
    root = _ROOTS[is_rotated]
    if tenant in ("", DEFAULT_TENANT):
        return root
    return blake2b(tenant.encode(), digest_size=16, key=root).digest()


def _expects_likeliest(sampling: SamplingParams, edits: LogitEdits | None) -> bool:
    """Whether the likeliest token is the next one if the grammar allows it, and nothing else is asked of the logits."""
    return sampling.temperature < GREEDY_BELOW and edits is None and sampling.logprobs is None
