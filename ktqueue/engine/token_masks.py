"""Which tokens the grammars of a step's sequences allow. The masks are computed while the model computes the step.

A mask is a row of 32-bit words, [ceil(vocab / 32)] int32, with the lowest token in the lowest bit.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Many
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ktqueue.answers.grammar import MaskWriter
from ktqueue.engine.sampler import GREEDY_BELOW
from ktqueue.engine.sequence import Sequence

_WORD = 32  # bits
_SMALL_VOCABULARY = 1 << 16  # up to it, adding a penalty to each logit is faster than looking for those to change
_OCTETS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_PENALTIES = np.where(_OCTETS == 1, np.float32(0.0), np.float32(-np.inf))  # [256, 8]: of the eight bits of a byte

Masks = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """The masks of some rows of a step. `rows`: their numbers; `masks`: [rows, words] int32, in the same order.

    `late` computes the masks of those greedy rows whose likeliest tokens, [rows] int64, are not allowed. It is None if
    all masks are here.
    """

    rows: list[int]
    masks: Masks
    late: Callable[[NDArray[np.int64]], "MaskedRows"] | None = None

    def completed(self, likeliest: NDArray[np.int64]) -> "MaskedRows":
        """These masks and the late ones, in the order of the rows. `likeliest`: the likeliest token of each row."""
        if self.late is None:
            return self
        late = self.late(likeliest)
        rows = np.array(self.rows + late.rows, dtype=np.int64)
        order = np.argsort(rows)
        return MaskedRows(rows[order].tolist(), np.concatenate([self.masks, late.masks])[order])


class TokenMasks:
    """Computes masks for a vocabulary of `vocab` tokens in a thread. `end_ids` end a text.

    With `ignore_eos` or `min_tokens` a choice with a grammar goes on while its grammar allows other tokens. Sequences
    without a grammar cost nothing. A sequence must not advance between `begin` and `take`.

    With `check_greedy` a greedy row gets a mask only if its likeliest token is not allowed. That is faster where the
    tokens are on the host anyway.
    """

    def __init__(self, vocab: int, end_ids: Iterable[int], *, check_greedy: bool) -> None:
        self._check_greedy = check_greedy
        self._words = -(-vocab // _WORD)
        self._end_ids = frozenset(end_ids)
        self._writer: MaskWriter | None = None  # made for the first grammar, because it has threads
        self._thread: ThreadPoolExecutor | None = None
        self._places: dict[Sequence, int] = {}
        self._begun: Future[Masks] | None = None

    def begin(self, rows: Mapping[Sequence, int]) -> None:
        """Start to compute the masks for a step that is launched now. `rows`: the number of tokens of each sequence."""
        constrained = [
            choice
            for sequence, count in rows.items()
            if count == sequence.remaining and sequence.samples
            for choice in (sequence, *sequence.forks)
            if choice.matcher is not None and not self._is_late(choice)
        ]
        self._places = {sequence: place for place, sequence in enumerate(constrained)}
        self._begun = None
        if constrained:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
            self._begun = self._thread.submit(self._compute, constrained)

    def take(self, sequences: Many[Sequence]) -> MaskedRows | None:
        """Wait for the masks of these sequences, by their rows here. Returns None if none of them has a grammar."""
        constrained = [row for row, sequence in enumerate(sequences) if sequence.matcher is not None]
        if not constrained:
            return None
        late = [row for row in constrained if self._is_late(sequences[row])]
        rows = [row for row in constrained if row not in set(late)] if late else constrained
        masks = self._begun_masks([sequences[row] for row in rows])
        return MaskedRows(
            rows, masks, (lambda likeliest: self._late_masks(sequences, late, likeliest)) if late else None
        )

    def _begun_masks(self, sequences: Many[Sequence]) -> Masks:
        begun = None if self._begun is None else self._begun.result()
        places = [self._places.get(sequence, -1) for sequence in sequences]
        if begun is None or -1 in places:  # choices that begin with this step, from the logits of a sibling's prompt
            return self._compute(sequences)
        return begun if places == list(range(len(begun))) else begun[places]

    def _late_masks(self, sequences: Many[Sequence], rows: list[int], likeliest: NDArray[np.int64]) -> MaskedRows:
        wrong = []
        for row, token_id in zip(rows, likeliest[rows].tolist(), strict=True):
            matcher = sequences[row].matcher
            if token_id in self._end_ids or (matcher is not None and not matcher.allows(token_id)):
                wrong.append(row)
        return MaskedRows(wrong, self._compute([sequences[row] for row in wrong]))

    def _is_late(self, sequence: Sequence) -> bool:
        """Whether the mask is computed only if the likeliest token is not allowed."""
        sampling = sequence.request.sampling
        greedy = self._check_greedy and sampling.temperature < GREEDY_BELOW
        return greedy and sequence.edits is None and sampling.logprobs is None

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _compute(self, sequences: Many[Sequence]) -> Masks:
        if self._writer is None:
            self._writer = MaskWriter()
        masks = np.zeros((len(sequences), self._words), dtype=np.int32)
        matchers = [sequence.matcher for sequence in sequences if sequence.matcher is not None]
        self._writer.write(matchers, masks.ctypes.data, masks.shape[1] * masks.itemsize)
        for row, sequence in enumerate(sequences):
            sampling = sequence.request.sampling
            if sequence.generated < sampling.min_tokens:
                _remove(masks[row], sequence.request.end_ids)
            elif sampling.ignore_eos:
                _remove(masks[row], self._end_ids)
        return masks


def _remove(mask: Masks, ids: Iterable[int]) -> None:
    """Remove tokens from a mask that allows others. If it allows no others, the answer has to end with one of these."""
    others = mask.copy()
    words = others.view(np.uint32)
    for token_id in ids:
        if token_id < _WORD * len(words):
            words[token_id // _WORD] &= np.uint32(~(1 << token_id % _WORD) & 0xFFFF_FFFF)
    if others.any():
        mask[:] = others


def apply_masks(logits: NDArray[np.float32], masked: MaskedRows) -> None:
    """Set the logits of tokens that are not allowed to -inf, in place. `logits`: [rows, vocab]."""
    vocab = logits.shape[1]
    octets = masked.masks.view(np.uint8)
    if vocab <= _SMALL_VOCABULARY:
        penalties = np.take(_PENALTIES, octets, axis=0).reshape(len(octets), -1)[:, :vocab]
        with np.errstate(invalid="ignore"):  # inf - inf, in rows whose logits are not finite anyway
            if len(masked.rows) == len(logits):
                logits += penalties
            else:
                logits[masked.rows] += penalties
        return
    allowed = np.unpackbits(octets, axis=1, bitorder="little")[:, :vocab].view(np.bool_)
    for row, mask in zip(masked.rows, allowed, strict=True):
        values = logits[row]
        if 2 * np.count_nonzero(mask) > vocab:
            values[~mask] = -np.inf
        else:  # most masks allow a few tokens only, and then copying these is faster
            ids = mask.nonzero()[0]
            kept = values[ids]
            values.fill(-np.inf)
            values[ids] = kept
