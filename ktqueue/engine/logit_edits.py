"""Edits of the logits before sampling, in the order and with the meaning that vLLM gives them:

1. All tokens but `allowed_token_ids` are -inf, if there are any.
2. `logit_bias` is added.
3. End tokens are -inf until `min_tokens` tokens are generated. The last token of a bad word is -inf if the tokens
   before it were generated.
4. For tokens of the prompt or the output, logits above 0 are divided by `repetition_penalty`, others multiplied by it.
5. For tokens of the output, `frequency_penalty` times their count and `presence_penalty` are subtracted.

Rows without edits cost nothing. Knows nothing of sampling.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ktqueue.core.request import SamplingParams

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]


class LogitEdits:
    """The edits of one choice, and the token counts that they need. Call `observe` for every generated token.

    `bad_words`: token ids of each spelling of the words that must not appear, at least one each.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        prompt: NDArray[np.int32],
        end_ids: Iterable[int],
        vocab: int,
        bad_words: Iterable[Sequence[int]] = (),
    ) -> None:
        self._min_tokens = sampling.min_tokens
        self._end_ids = np.array(sorted(i for i in end_ids if i < vocab), dtype=np.int64)
        self._generated = 0
        self.allowed_ids = np.unique(np.array(sampling.allowed_token_ids, dtype=np.int64))
        self._bad_words = [tuple(word) for word in bad_words]
        self._recent: list[int] = []  # the last generated tokens, as many as a bad word may have before its last
        self._longest = max((len(word) - 1 for word in self._bad_words), default=0)
        self.bias_ids = np.fromiter(sampling.logit_bias.keys(), dtype=np.int64)
        self.bias = np.fromiter(sampling.logit_bias.values(), dtype=np.float32)
        self.repetition = sampling.repetition_penalty
        self.frequency = sampling.frequency_penalty
        self.presence = sampling.presence_penalty
        self._penalised = self.repetition != 1.0 or self.frequency != 0.0 or self.presence != 0.0
        self._ids = np.unique(prompt).astype(np.int64) if self.repetition != 1.0 else np.empty(0, dtype=np.int64)
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._size = len(self._ids)
        self._place = {int(token_id): place for place, token_id in enumerate(self._ids)} if self._penalised else {}

    @staticmethod
    def needed(sampling: SamplingParams) -> bool:
        """Whether these parameters edit any logits."""
        return bool(
            sampling.min_tokens
            or sampling.logit_bias
            or sampling.allowed_token_ids
            or sampling.bad_words
            or sampling.repetition_penalty != 1.0
            or sampling.frequency_penalty
            or sampling.presence_penalty
        )

    @property
    def masked_ids(self) -> Integers:
        """Token ids that must not come next, [ids] int64."""
        masked = self._end_ids if self._generated < self._min_tokens else self._end_ids[:0]
        if not self._bad_words:
            return masked
        recent = tuple(self._recent)
        bad = [word[-1] for word in self._bad_words if recent[len(recent) - len(word) + 1 :] == word[:-1]]
        return np.concatenate([masked, np.array(bad, dtype=np.int64)])

    @property
    def counted(self) -> tuple[Integers, Floats]:
        """Token ids that penalties apply to, [ids] int64, and how often each was generated, [ids] float32."""
        return self._ids[: self._size], self._counts[: self._size]

    def observe(self, token_id: int) -> None:
        """Count a generated token."""
        self._generated += 1
        if self._longest:
            self._recent = [*self._recent[-self._longest + 1 :], token_id] if self._longest > 1 else [token_id]
        if not self._penalised:
            return
        place = self._place.get(token_id)
        if place is None:
            place = self._place[token_id] = self._size
            if self._size == len(self._ids):
                room = max(64, self._size)
                self._ids = np.concatenate([self._ids, np.empty(room, dtype=np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.float32)])
            self._ids[place] = token_id
            self._counts[place] = 0.0
            self._size += 1
        self._counts[place] += 1.0


@dataclass(frozen=True, slots=True)
class FlatEdits:
    """The edits of several rows as flat arrays. Entry i changes the logit of `*_ids[i]` in row `*_rows[i]`.

    `limited_rows`: rows in which only the entries of `allowed_ids` may be chosen.
    """

    limited_rows: Integers
    allowed_rows: Integers
    allowed_ids: Integers
    bias_rows: Integers
    bias_ids: Integers
    bias: Floats
    masked_rows: Integers
    masked_ids: Integers
    counted_rows: Integers
    counted_ids: Integers
    counts: Floats
    repetition: Floats
    frequency: Floats
    presence: Floats


def flat_edits(rows: Sequence[int], edits: Sequence[LogitEdits]) -> FlatEdits:
    """Flatten the edits of a step. `edits[i]` belongs to row `rows[i]`; each row appears once."""
    row_numbers = np.array(rows, dtype=np.int64)
    bias_rows, bias_ids = _flat(row_numbers, [row.bias_ids for row in edits])
    masked_rows, masked_ids = _flat(row_numbers, [row.masked_ids for row in edits])
    allowed_rows, allowed_ids = _flat(row_numbers, [row.allowed_ids for row in edits])
    counted = [row.counted for row in edits]
    counted_rows, counted_ids = _flat(row_numbers, [ids for ids, _ in counted])
    sizes = [len(ids) for ids, _ in counted]

    def repeat(values: list[float]) -> Floats:
        return np.repeat(np.array(values, dtype=np.float32), sizes)

    return FlatEdits(
        limited_rows=np.unique(allowed_rows),
        allowed_rows=allowed_rows,
        allowed_ids=allowed_ids,
        bias_rows=bias_rows,
        bias_ids=bias_ids,
        bias=np.concatenate([row.bias for row in edits]),
        masked_rows=masked_rows,
        masked_ids=masked_ids,
        counted_rows=counted_rows,
        counted_ids=counted_ids,
        counts=np.concatenate([counts for _, counts in counted]),
        repetition=repeat([row.repetition for row in edits]),
        frequency=repeat([row.frequency for row in edits]),
        presence=repeat([row.presence for row in edits]),
    )


def edit(logits: Floats, edits: FlatEdits) -> None:
    """Edit `logits` [rows, vocab] in place."""
    if len(edits.limited_rows):
        allowed = logits[edits.allowed_rows, edits.allowed_ids]
        logits[edits.limited_rows] = -np.inf
        logits[edits.allowed_rows, edits.allowed_ids] = allowed
    if len(edits.bias):
        logits[edits.bias_rows, edits.bias_ids] += edits.bias
    if len(edits.masked_ids):
        logits[edits.masked_rows, edits.masked_ids] = -np.inf
    if len(edits.counts):
        values = logits[edits.counted_rows, edits.counted_ids]
        with np.errstate(over="ignore"):
            values = np.where(values > 0.0, values / edits.repetition, values * edits.repetition)
        values -= edits.frequency * edits.counts
        logits[edits.counted_rows, edits.counted_ids] = values - edits.presence * (edits.counts > 0.0)


def _flat(rows: Integers, ids: Sequence[Integers]) -> tuple[Integers, Integers]:
    """Row and id of every entry of a ragged list, both [entries] int64."""
    return np.repeat(rows, [len(row_ids) for row_ids in ids]), np.concatenate(ids)
