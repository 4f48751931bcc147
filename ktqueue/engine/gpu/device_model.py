"""What a model may want of the engine beside being called: memory on a device, a moment after each step, an end."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from ktqueue.engine.runner import Model
from ktqueue.operators.gpu.settings import GpuSettings


@runtime_checkable
class DeviceModel(Protocol):
    """A model with parts of its own on a device, in threads or in pinned memory."""

    def prepare_device(self, settings: GpuSettings) -> None:
        """Take what steps of these sizes need. Called once, before the first step."""

    def after_step(self) -> None:
        """The results of a step are on the host, and nothing of it is under way. Raises what went wrong in it."""

    def statistics(self) -> Mapping[str, float]:
        """Counts and shares of its own by name, for whoever watches the worker."""

    def close(self) -> None:
        """There will be no step more."""


class _Plain:
    """A model that wants nothing."""

    def prepare_device(self, settings: GpuSettings) -> None:
        pass

    def after_step(self) -> None:
        pass

    def statistics(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        pass


def device_model(model: Model) -> DeviceModel:
    """The model itself if it is a DeviceModel, else one that does nothing."""
    return model if isinstance(model, DeviceModel) else _Plain()
