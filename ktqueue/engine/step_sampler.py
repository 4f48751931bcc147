"""Chooses a token for each sequence of a step: some rows at a time, and in halves while the device is out of memory."""

import logging
from collections.abc import Sequence as Many
from functools import partial

import torch

from ktqueue.engine.logits import Logits
from ktqueue.engine.memory_plan import SAMPLED_ROWS
from ktqueue.engine.prepared_step import MayLaunch, NextStep, never
from ktqueue.engine.sequence import Sequence
from ktqueue.engine.token_masks import TokenMasks
from ktqueue.engine.token_selector import Meanwhile, Selector, TokenSelection, do_nothing

log = logging.getLogger(__name__)

Ready = Many[tuple[int, Sequence, int]]
"""Rows of logits and their sequences. The last number is how many drafts a row comes after: see Selector.select."""


class StepSampler:
    """Calls `selector` with the masks of `masks`, and prepares `next_step` meanwhile.

    `out_of_memory`: how often the device had too little memory.
    """

    def __init__(self, selector: Selector, masks: TokenMasks, next_step: NextStep) -> None:
        self.out_of_memory = 0
        self._selector = selector
        self._masks = masks
        self._next = next_step

    def sample(
        self, logits: Logits, ready: Ready, launch_next: MayLaunch | None, meanwhile: Meanwhile = do_nothing
    ) -> TokenSelection:
        """Choose tokens from `logits` [scored, vocab] float32. The next step may be launched if all are chosen at once.

        launch_next: see Engine.step; None: the next step is not prepared, since it is not known how many of these
        tokens are kept. `meanwhile` is called instead, before the device is waited for.

        Raises torch.OutOfMemoryError if there is no memory for a single row, or if a launched step overwrites logits
        that would be needed again.
        """
        if launch_next is not None and len(ready) > SAMPLED_ROWS:
            launch_next = never
        selection = self._sample(logits, ready[:SAMPLED_ROWS], launch_next, meanwhile)
        for start in range(SAMPLED_ROWS, len(ready), SAMPLED_ROWS):
            selection = selection.joined(self._sample(logits, ready[start : start + SAMPLED_ROWS], None))
        return selection

    def _sample(
        self, logits: Logits, ready: Ready, launch_next: MayLaunch | None, meanwhile: Meanwhile = do_nothing
    ) -> TokenSelection:
        """Choose tokens, and prepare the next step meanwhile, unless `launch_next` is None."""
        rows, sequences = [row for row, _, _ in ready], [sequence for _, sequence, _ in ready]
        ahead = [ahead for _, _, ahead in ready]
        if launch_next is not None:
            meanwhile = partial(self._next.prepare, sequences, launch_next)
        try:
            masked = self._masks.take(sequences, ahead)
            return self._selector.select(logits, rows, sequences, meanwhile, masked, ahead)
        except torch.OutOfMemoryError as error:
            if len(ready) == 1 or self._next.is_launched:
                raise
            log.warning("out of memory while sampling %d tokens: %s", len(ready), error)
        self.out_of_memory += 1
        torch.cuda.empty_cache()
        half = len(ready) // 2
        first = self._sample(logits, ready[:half], None if launch_next is None else never)
        return first.joined(self._sample(logits, ready[half:], None))
