"""Runs the model over one batch. Knows only how a transformers causal language model is called."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from ktqueue.engine.batch import Batch

Model = Callable[..., Any]
"""`model(input_ids, position_ids, use_cache=False, logits_to_keep=..., step=...)`, whose result has `.logits`
[1, scored, vocab]; all tensors are on the model's device."""


class Runner(Protocol):
    """The engine's way to the model, on whatever device."""

    @property
    def replayed(self) -> int:
        """Steps that replayed a captured one."""

    def execute(self, batch: Batch) -> torch.Tensor:
        """Logits of the batch's scored tokens, [scored, vocab] float32 on the model's device.

        They may still be in the making when this returns. They are good until the next call, and the caller may write
        to them. Columns beyond the vocabulary (models pad theirs) are cut off. Whatever the model raises is raised.
        """

    def prepare(self, batch: Batch) -> bool:
        """Do what can be done for the `execute` of this very batch before its token ids are known. The device may still
        be at the last step: what is launched comes behind it, and its logits stay good. Another batch may be executed
        instead. Whether `execute` will do nothing but a launch, which takes no memory."""

    def wait(self) -> None:
        """Return once the device has done all that it was given."""


class HostRunner:
    """Runner of a model on the CPU, with tokens of ids below `vocab`."""

    replayed = 0

    def __init__(self, model: Model, vocab: int) -> None:
        self._model = model
        self._vocab = vocab

    def execute(self, batch: Batch) -> torch.Tensor:
        """As Runner says; done when it returns."""
        with torch.inference_mode():
            logits: torch.Tensor = self._model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                use_cache=False,
                logits_to_keep=batch.scored,
                step=batch.step,
            ).logits
            return logits[0, :, : self._vocab].float()

    def prepare(self, batch: Batch) -> bool:
        """Nothing can be done."""
        return False

    def wait(self) -> None:
        """Nothing is ever under way."""
