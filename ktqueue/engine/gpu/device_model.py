"""What the engine calls on a model besides the forward pass: preparation, the end of a step, statistics, close."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from ktqueue.engine.runner import Model
from ktqueue.operators.gpu.settings import GpuSettings


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


class _PlainModel:
    """A model without anything to prepare or release."""

    def prepare_device(self, settings: GpuSettings) -> None:
        pass

    def after_step(self) -> None:
        pass

    def statistics(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        pass


def device_model(model: Model) -> DeviceModel:
    """The model itself if it is a DeviceModel, else a stand-in that does nothing."""
    return model if isinstance(model, DeviceModel) else _PlainModel()
