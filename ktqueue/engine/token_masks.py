"""Which tokens the grammars of a step's sequences allow. The masks are computed while the model computes the step.

A mask is a row of 32-bit words, [ceil(vocab / 32)] int32, with the lowest token in the lowest bit.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ktqueue.answers.grammar import MaskWriter
from ktqueue.engine.sequence import Sequence

_WORD = 32  # bits
_STEPS_AFTER_MISS = 16  # of a row, whose masks are computed in advance

Masks = NDArray[np.int32]
Drafted = Mapping[Sequence, Many[int]]
"""The drafts of a step. The grammar of their sequence allows them one after the other."""
_NO_DRAFTS: Drafted = {}


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
        self._places: dict[Sequence, int] = {}  # of their first masks
        self._drafted: set[Sequence] = set()  # those that have drafts in the step
        self._tasks: list[tuple[Masks, Callable[[], None]]] = []  # for those, in turns: the last masks may be in use
        self._begun: Masks | None = None

    def begin(self, rows: Mapping[Sequence, int], drafts: Drafted = _NO_DRAFTS) -> None:
        """Start to compute the masks for a step that is launched now.

        rows: the number of tokens of each sequence. drafts: the last of them that are drafts. A sequence with drafts
        has a mask after each of them too, also if it is greedy.
        """
        constrained = [
            choice
            for sequence, count in rows.items()
            if sequence.matcher is not None
            and count == sequence.remaining + len(drafts.get(sequence, ()))
            and sequence.samples
            for choice in (sequence, *sequence.forks)
            if choice in drafts or not self._is_checked(choice)
        ]
        self._drafted = {sequence for sequence in constrained if sequence in drafts}
        if not constrained:
            self.forget()
            return
        if constrained != self._constrained or self._drafted:
            self._wait()
            counts = [1 + len(drafts.get(sequence, ())) for sequence in constrained]
            places = itertools.accumulate(counts, initial=0)
            self._places = dict(zip(constrained, places, strict=False))
            self._constrained = [] if self._drafted else constrained  # drafts differ each time
            self._tasks = [self._task(constrained, drafts) for _ in range(1 if self._drafted else 2)]
        self._tasks.reverse()
        self._begun, task = self._tasks[0]
        self._make_writer().start(task)

    def forget(self) -> None:
        """Forget the sequences of the last step with masks."""
        self._begun = None
        if self._places:
            self._wait()
            self._constrained, self._places, self._tasks = [], {}, []

    def take(self, sequences: Many[Sequence], ahead: Many[int] = ()) -> MaskedRows | None:
        """Wait for the masks of these sequences, by their rows here. Returns None if none of them has a grammar.

        ahead: see Selector.select.
        """
        rows: list[int] = []
        late: list[int] = []
        for row, sequence in enumerate(sequences):
            if sequence.matcher is not None:
                if sequence not in self._drafted and self._is_checked(sequence):
                    late.append(row)
                else:
                    rows.append(row)
                    sequence.masks_in_advance -= 1
        if not rows and not late:
            return None
        self._wait()
        masks = self._begun_masks([(sequences[row], ahead[row] if ahead else 0) for row in rows])
        return MaskedRows(
            rows, masks, (lambda likeliest: self._late_masks(sequences, late, likeliest)) if late else None
        )

    def _is_checked(self, sequence: Sequence) -> bool:
        """Whether the sequence has a mask only if its likeliest token is not allowed."""
        return self._check_greedy and sequence.expects_likeliest and sequence.masks_in_advance <= 0

    def _begun_masks(self, rows: Many[tuple[Sequence, int]]) -> Masks:
        """The masks of these sequences, each after so many of its drafts."""
        if not rows:
            return self._none
        begun = self._none if self._begun is None else self._begun
        known = {} if self._begun is None else self._places
        # Not known are choices that begin with this step, from the logits of a sibling's prompt.
        new = [sequence for sequence, _ in rows if sequence not in known]
        places = [known[sequence] + ahead for sequence, ahead in rows if sequence in known]
        if not new:
            return begun if places == list(range(len(begun))) else begun[places]
        masks = np.empty((len(rows), self._words), dtype=np.int32)
        is_new = np.array([sequence not in known for sequence, _ in rows])
        masks[is_new], masks[~is_new] = self._compute(new), begun[places]
        return masks

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
        masks = np.empty((len(sequences), self._words), dtype=np.int32)
        matchers = [sequence.matcher for sequence in sequences if sequence.matcher is not None]
        self._make_writer().write(matchers, masks.ctypes.data, masks.shape[1] * masks.itemsize)
        self._remove_ends(masks, sequences)
        return masks

    def _task(self, sequences: Many[Sequence], drafts: Drafted) -> tuple[Masks, Callable[[], None]]:
        """Memory for the masks of these sequences, each followed by those after its drafts, and what writes them."""
        owners = [sequence for sequence in sequences for _ in range(1 + len(drafts.get(sequence, ())))]
        masks = np.empty((len(owners), self._words), dtype=np.int32)
        matchers = [
            state
            for sequence in sequences
            if sequence.matcher is not None
            for state in (sequence.matcher, *sequence.matcher.after(drafts.get(sequence, ())))
        ]
        return masks, self._make_writer().task(
            matchers, masks.ctypes.data, masks.shape[1] * masks.itemsize, lambda: self._remove_ends(masks, owners)
        )

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
