"""Runs the model over one batch. Knows only how a transformers causal language model is called."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ktqueue.engine.batch import Batch


class Runner:
    """Calls `model(input_ids, position_ids, use_cache=False, logits_to_keep=..., step=...)`.

    Its result has `.logits` [1, scored, vocab].
    """

    def __init__(self, model: Callable[..., Any], vocab: int) -> None:
        self._model = model
        self._vocab = vocab

    def execute(self, batch: Batch) -> NDArray[np.float32]:
        """Logits of the batch's scored tokens on the host, [scored, vocab]; the caller may write to them.

        Columns beyond the vocabulary (models pad theirs) are cut off. Whatever the model raises is raised.
        """
        with torch.inference_mode():
            logits = self._model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                use_cache=False,
                logits_to_keep=batch.scored,
                step=batch.step,
            ).logits
            host: NDArray[np.float32] = logits[0, :, : self._vocab].float().cpu().numpy()
            return host
