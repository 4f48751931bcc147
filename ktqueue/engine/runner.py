"""Runs the model on one batch. Knows only how to call a causal language model of transformers."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from ktqueue.engine.batch import Batch
from ktqueue.engine.logits import Logits

Model = Callable[..., Any]
"""`model(input_ids, position_ids, use_cache=False, logits_to_keep=..., step=...)`, whose result has `.logits`
[1, scored, vocab]; all tensors are on the model's device."""


@dataclass(frozen=True, slots=True)
class DeviceTokens:
    """Token ids of a batch that are known on the device only. The id of row i is `ids[places[i]]`.

    ids: [sampled] int64 on the model's device.
    """

    ids: torch.Tensor
    places: list[int]


class Runner(Protocol):
    """Calls the model, on any device."""

    @property
    def replayed(self) -> int:
        """Number of steps that replayed a captured step."""

    def execute(self, batch: Batch, tokens: DeviceTokens | None = None) -> Logits:
        """Logits of the batch's scored tokens, [scored, vocab] float32 on the model's device.

        `tokens` replaces the token ids of a batch for which `prepare` returned True. The device may still be computing
        the logits when this returns. They are valid until the next call, and the caller may overwrite them. Columns
        beyond the vocabulary, which models pad, are cut off. Errors of the model are passed on.
        """

    def prepare(self, batch: Batch) -> bool:
        """Do what is possible for `execute(batch)` before the batch's token ids are known.

        The device may still compute the last step: new work is queued behind it, and its logits stay valid. Another
        batch may be executed instead. Returns whether `execute` will only have to launch, which takes no memory.
        """

    def wait(self) -> None:
        """Block until the device has finished all queued work."""

    def learn(self, seconds: float) -> None:
        """Note how long the last step took."""


class LaunchedStep(Protocol):
    """A step that is launched in parts: see PartedStep."""

    logits: Logits | None

    @property
    def is_done(self) -> bool:
        """Whether the device has computed the logits."""

    def keep_ahead(self, *, until_idle: bool = False) -> None:
        """Launch until the device has enough to do. until_idle: or has done what is queued on the current stream
        now."""

    def finish(self) -> Logits:
        """Launch what is left, and wait for the logits."""


@runtime_checkable
class OverlappingRunner(Runner, Protocol):
    """A runner that can run other steps before a long step is done."""

    @property
    def may_overlap(self) -> bool:
        """Whether the model's steps can be overlapped."""

    def begin(self, batch: Batch) -> LaunchedStep:
        """Begin a step that leaves the CPU's experts to others. `end_overlap` follows it."""

    def beside(self) -> AbstractContextManager[object]:
        """Inside of it, work is not queued behind the overlapped step, and overtakes it."""

    def execute_beside(self, batch: Batch, overlapped: LaunchedStep) -> Logits:
        """As `execute`, inside `beside`."""

    def end_overlap(self) -> None:
        """Call it when the overlapped step and all others are done."""


class HostRunner:
    """Runner of a model on the CPU. Token ids are below `vocab`."""

    replayed = 0

    def __init__(self, model: Model, vocab: int) -> None:
        self._model = model
        self._vocab = vocab

    def execute(self, batch: Batch, tokens: DeviceTokens | None = None) -> torch.Tensor:
        """See Runner. The logits are complete when this returns."""
        assert tokens is None, "no batch is prepared"
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
        """See Runner. Nothing can be prepared on the CPU."""
        return False

    def wait(self) -> None:
        """See Runner. Nothing is ever queued on the CPU."""

    def learn(self, seconds: float) -> None:
        """See Runner. There is nothing to choose on the CPU."""
