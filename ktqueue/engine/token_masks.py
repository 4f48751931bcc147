"""Which tokens the grammars of a step's sequences allow. The masks are computed while the model computes the step.

A mask is a row of 32-bit words, [ceil(vocab / 32)] int32, with the lowest token in the lowest bit.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ktqueue.answers.grammar import MaskWriter, Matcher
from ktqueue.engine.sequence import Sequence

_WORD = 32  # bits
_STEPS_AFTER_MISS = 16  # of a row, whose masks are computed in advance

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
        if not late.rows:
            return MaskedRows(self.rows, self.masks)
        rows = np.array(self.rows + late.rows, dtype=np.int64)
        order = np.argsort(rows)
        return MaskedRows(rows[order].tolist(), np.concatenate([self.masks, late.masks])[order])


class TokenMasks:
    """Computes masks for a vocabulary of `vocab` tokens in a thread. `end_ids` end a text.

    With `ignore_eos` or `min_tokens` a choice with a grammar goes on while its grammar allows other tokens. Sequences
    without a grammar cost nothing. A sequence must not advance between `begin` and `take`.

    With `check_greedy` a greedy row gets a mask only if its likeliest token is not allowed. That is faster where the
    tokens are on the host anyway. After such a miss, the masks of its next steps are computed in advance.
    """

    def __init__(self, vocab: int, end_ids: Iterable[int], *, check_greedy: bool) -> None:
        self._check_greedy = check_greedy
        self._words = -(-vocab // _WORD)
        self._end_ids = frozenset(end_ids)
        self._none: Masks = np.zeros((0, self._words), dtype=np.int32)
        self._writer: MaskWriter | None = None  # made for the first grammar, because it has threads
        self._constrained: list[Sequence] = []
        self._places: dict[Sequence, int] = {}  # of those
        self._tasks: list[tuple[Masks, Callable[[], None]]] = []  # for those, in turns: the last masks may be in use
        self._begun: Masks | None = None

    def begin(self, rows: Mapping[Sequence, int]) -> None:
        """Start to compute the masks for a step that is launched now. `rows`: the number of tokens of each sequence."""
        constrained = [
            choice
            for sequence, count in rows.items()
            if sequence.matcher is not None and count == sequence.remaining and sequence.samples
            for choice in (sequence, *sequence.forks)
            if not (self._check_greedy and choice.expects_likeliest and choice.masks_in_advance <= 0)
        ]
        if not constrained:
            self._begun = None
            return
        if constrained != self._constrained:
            self._wait()
            self._constrained = constrained
            self._places = {sequence: place for place, sequence in enumerate(constrained)}
            self._tasks = [self._task(constrained), self._task(constrained)]
        self._tasks.reverse()
        self._begun, task = self._tasks[0]
        self._make_writer().start(task)

    def take(self, sequences: Many[Sequence]) -> MaskedRows | None:
        """Wait for the masks of these sequences, by their rows here. Returns None if none of them has a grammar."""
        rows: list[int] = []
        late: list[int] = []
        check_greedy = self._check_greedy
        for row, sequence in enumerate(sequences):
            if sequence.matcher is not None:
                if check_greedy and sequence.expects_likeliest and sequence.masks_in_advance <= 0:
                    late.append(row)
                else:
                    rows.append(row)
                    sequence.masks_in_advance -= 1
        if not rows and not late:
            return None
        self._wait()
        masks = self._begun_masks([sequences[row] for row in rows])
        return MaskedRows(
            rows, masks, (lambda likeliest: self._late_masks(sequences, late, likeliest)) if late else None
        )

    def _begun_masks(self, sequences: Many[Sequence]) -> Masks:
        if not sequences:
            return self._none
        places = [self._places.get(sequence, -1) for sequence in sequences]
        if self._begun is None or -1 in places:
            return self._compute(sequences)  # choices that begin with this step, from the logits of a sibling's prompt
        begun = self._begun
        return begun if places == list(range(len(begun))) else begun[places]

    def _late_masks(self, sequences: Many[Sequence], rows: list[int], likeliest: NDArray[np.int64]) -> MaskedRows:
        wrong = []
        for row, token_id in zip(rows, likeliest[rows].tolist(), strict=True):
            sequence = sequences[row]
            if token_id in self._end_ids:
                wrong.append(row)
            elif sequence.matcher is not None and not sequence.matcher.accept(token_id):
                sequence.masks_in_advance = _STEPS_AFTER_MISS
                wrong.append(row)
        return MaskedRows(wrong, self._compute([sequences[row] for row in wrong]) if wrong else self._none)

    def close(self) -> None:
        """End the thread."""
        if self._writer is not None:
            self._writer.close()

    def _compute(self, sequences: Many[Sequence]) -> Masks:
        masks, matchers = self._empty_masks(sequences)
        self._make_writer().write(matchers, masks.ctypes.data, masks.shape[1] * masks.itemsize)
        self._remove_ends(masks, sequences)
        return masks

    def _task(self, sequences: Many[Sequence]) -> tuple[Masks, Callable[[], None]]:
        """Memory for the masks of these sequences, and what writes them."""
        masks, matchers = self._empty_masks(sequences)
        return masks, self._make_writer().task(
            matchers, masks.ctypes.data, masks.shape[1] * masks.itemsize, lambda: self._remove_ends(masks, sequences)
        )

    def _empty_masks(self, sequences: Many[Sequence]) -> tuple[Masks, list[Matcher]]:
        masks = np.empty((len(sequences), self._words), dtype=np.int32)
        return masks, [sequence.matcher for sequence in sequences if sequence.matcher is not None]

    def _make_writer(self) -> MaskWriter:
        if self._writer is None:
            self._writer = MaskWriter()
        return self._writer

    def _wait(self) -> None:
        if self._writer is not None:
            self._writer.wait()

    def _remove_ends(self, masks: Masks, sequences: Many[Sequence]) -> None:
        """Remove the end of the text from the masks where `ignore_eos` or `min_tokens` postpones it."""
        endless = []
        for row, sequence in enumerate(sequences):
            sampling = sequence.request.sampling
            if sequence.generated < sampling.min_tokens:
                _remove(masks, np.array([row]), sequence.request.end_ids)
            elif sampling.ignore_eos:
                endless.append(row)
        if endless:
            _remove(masks, np.array(endless), self._end_ids)


def _remove(masks: Masks, rows: NDArray[np.int64], ids: Iterable[int]) -> None:
    """Remove tokens from the masks of `rows`, where these allow others. Where they do not, an answer must end."""
    places = [divmod(token_id, _WORD) for token_id in ids if token_id < _WORD * masks.shape[1]]
    bits = [(word, np.uint32(1 << bit).view(np.int32)) for word, bit in places]
    allowing = np.logical_or.reduce([masks[rows, word] & bit != 0 for word, bit in bits]) if bits else np.False_
    if not allowing.any():
        return
    rows = rows[allowing]
    others = masks[rows]
    for word, bit in bits:
        others[:, word] &= ~bit
    kept = others.any(axis=1)
    masks[rows[kept]] = others[kept]
