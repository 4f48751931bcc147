"""What the engine calls on a model besides the forward pass: preparation, the end of a step, statistics, close."""

import logging
from collections.abc import Generator, Mapping
from typing import Protocol, TypeGuard, runtime_checkable

import torch
from torch import nn

from ktqueue.core.expert_work import CountsExperts
from ktqueue.engine.runner import Model
from ktqueue.operators.gpu.settings import GpuSettings
from ktqueue.operators.step import StepInputs

log = logging.getLogger(__name__)


@runtime_checkable
class DeviceModel(Protocol):
    """A model that has device memory, threads or pinned memory of its own."""

    def prepare_device(self, settings: GpuSettings) -> None:
        """Allocate what steps of these sizes need. Called once, before the first step."""

    def after_step(self) -> None:
        """Called when a step is complete and its results are on the host. Raises the errors of the step."""

    def statistics(self) -> Mapping[str, float]:
        """The model's own counters by name, for metrics."""

    def close(self) -> None:
        """Release everything. No step follows."""


@runtime_checkable
class StreamingModel(Protocol):
    """A model whose eager steps may copy experts to the device, which captured steps cannot."""

    def streams(self, tokens: int) -> bool:
        """Whether an eager step of `tokens` tokens may do so."""


@runtime_checkable
class CapturesPrompts(Protocol):
    """A model whose steps with prompts can be captured, too."""

    @property
    def most_captured_tokens(self) -> int:
        """Tokens of the largest such step; 0: none. Known once the device is prepared."""


@runtime_checkable
class OverlappingModel(Protocol):
    """A model that launches steps in parts, so that others can run before a step is done, and its head apart."""

    @property
    def may_overlap(self) -> bool:
        """Whether a step may be overlapped."""

    def forward_in_parts(self, inputs: StepInputs, *, overlapped: bool = False) -> Generator[None, None, torch.Tensor]:
        """See GpuDecoder."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """See GpuDecoder."""

    def end_overlap(self) -> None:
        """Called when an overlapped step is done, and those that ran meanwhile."""


class _PlainModel:
    """A model that has nothing to prepare. Its operators are closed with it."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def prepare_device(self, settings: GpuSettings) -> None:
        pass

    def after_step(self) -> None:
        pass

    def statistics(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        for module in self.model.modules() if isinstance(self.model, nn.Module) else ():
            if callable(close := getattr(module, "close", None)):  # an operator, whose class this layer must not import
                try:
                    close()
                except Exception:  # an operator of a package can fail in any way
                    log.exception("%s failed in close", type(module).__name__)


def device_model(model: Model) -> DeviceModel:
    """The model itself if it is a DeviceModel, else a stand-in that closes its operators."""
    return model if isinstance(model, DeviceModel) else _PlainModel(model)


def can_overlap(model: Model) -> TypeGuard[OverlappingModel]:
    """Whether steps of the model may overlap."""
    return isinstance(model, OverlappingModel) and model.may_overlap


def expert_counts(model: DeviceModel) -> CountsExperts | None:
    """What counts the work of the model's experts, if it does."""
    counter = model.model if isinstance(model, _PlainModel) else model
    return counter if isinstance(counter, CountsExperts) else None
