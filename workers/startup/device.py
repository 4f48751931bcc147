"""Checks `engine.device`. An error says why an engine cannot run on a device, and what to do about it.

torch is imported only to search for a GPU, so that `ktqueue up` refuses an unknown name at once.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from ktqueue.core.errors import ConfigError

SUPPORTED = "cpu, cuda or cuda:N"
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_OTHERS = {
    "xpu": "Intel GPUs",
    "hpu": "Intel Gaudi accelerators",
    "npu": "Ascend NPUs",
    "mlu": "Cambricon MLUs",
    "musa": "Moore Threads GPUs",
    "rocm": "AMD GPUs",
    "hip": "AMD GPUs",
    "mps": "Apple GPUs",
    "xla": "TPUs",
    "tpu": "TPUs",
    "vulkan": "GPUs through Vulkan",
}


def check_device_name(device: str) -> None:
    """Raise ConfigError for a device on which no engine can run, on any machine."""
    kind, _, index = device.partition(":")
    if name := _OTHERS.get(kind):
        raise _wrong(device, f"{SUPPORTED}: {name} are not supported yet; cpu works on any machine")
    if kind == "gpu":
        raise _wrong(device, f"{SUPPORTED}; did you mean cuda?")
    if device != "cpu" and (kind != "cuda" or (index and not index.isdecimal()) or device.endswith(":")):
        raise _wrong(device, SUPPORTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaInstallation:
    """What decides whether CUDA works in this process. `cuda` and `hip`: versions that torch was built for, if any.

    `gpus`: number of GPUs that torch can use. `has_driver`: whether NVIDIA's driver is loaded. `fault`: why torch
    cannot use that driver; empty if it can.
    """

    torch: str
    cuda: str | None
    hip: str | None = None
    gpus: int = 0
    has_driver: bool = False
    fault: str = ""


def find_cuda() -> CudaInstallation:
    """Examine torch and the driver of this machine."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    has_driver, fault = NVIDIA_DRIVER.exists(), ""
    if not gpus and has_driver and torch.version.cuda is not None:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:
            fault = str(error)
    return CudaInstallation(
        torch=torch.__version__,
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        gpus=gpus,
        has_driver=has_driver,
        fault=fault,
    )


def has_unused_gpu(device: str) -> bool:
    """Whether an NVIDIA GPU is here and the model will not be on it. Imports no torch."""
    return device == "cpu" and NVIDIA_DRIVER.exists()


def check_device_is_here(device: str, installation: CudaInstallation | None = None) -> None:
    """Raise ConfigError, with the reason, for a GPU that this process cannot use. `device` passed check_device_name.

    `installation`: the result of `find_cuda`, which is called if it is not given.
    """
    if device == "cpu":
        return
    installation = installation or find_cuda()
    if reason := missing_cuda(installation):
        raise _wrong(device, f"cpu on this machine: {reason}", "cpu")
    count, number = installation.gpus, int(device.partition(":")[2] or 0)
    if number >= count:
        raise _wrong(device, f"cuda on this machine, which has {count} GPU{'s' if count > 1 else ''}", "cuda")
    if number > 0:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        chosen = visible[number] if number < len(visible) else number
        wanted = f"cuda: a process uses one GPU, and CUDA_VISIBLE_DEVICES={chosen} makes it this one"
        raise _wrong(device, wanted, "cuda")


def missing_cuda(found: CudaInstallation) -> str | None:
    """Return why CUDA cannot be used, and how to change that; None if it can be used."""
    if found.hip is not None:
        return f"torch {found.torch} is built for ROCm (AMD GPUs are not supported yet), not for CUDA"
    if found.cuda is None:
        release = found.torch.partition("+")[0]
        return (
            f"{'' if found.has_driver else 'no NVIDIA driver is loaded, and '}torch {found.torch} is built without "
            f"CUDA; `pip install --force-reinstall torch=={release}` installs the build with CUDA from PyPI"
        )
    if found.gpus:
        return None
    if not found.has_driver:
        return "no NVIDIA driver is loaded; `nvidia-smi` must list a GPU (start a container with --gpus all)"
    if found.fault:
        return f"torch's CUDA {found.cuda} cannot use the driver: {found.fault.splitlines()[0]}"
    return "the NVIDIA driver lists no GPU to this process (CUDA_VISIBLE_DEVICES may hide them)"


def _wrong(device: str, wanted: str, limit: str = SUPPORTED) -> ConfigError:
    return ConfigError.must_be("engine.device", wanted, device, limit=limit)
