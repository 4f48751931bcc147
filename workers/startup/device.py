"""Checks `engine.device`. An error says why an engine cannot run on a device, and what to do about it.

torch is imported only to search for a GPU, so that `ktqueue up` refuses an unknown name at once.
"""

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


def check_device_is_here(device: str) -> None:
    """Raise ConfigError, with the reason, for a GPU that this process cannot use. `device` passed check_device_name."""
    if device == "cpu":
        return
    import torch

    if reason := missing_cuda():
        raise _wrong(device, f"cpu on this machine: {reason}", "cpu")
    count = torch.cuda.device_count()
    if int(device.partition(":")[2] or 0) >= count:
        last = f"cuda:0 to cuda:{count - 1}" if count > 1 else "cuda or cuda:0"
        raise _wrong(device, f"{last} on this machine, which has {count} GPU{'s' if count > 1 else ''}", last)


def missing_cuda() -> str | None:
    """Return why CUDA cannot be used here, and how to change that; None if it can be used."""
    import torch

    if torch.version.hip is not None:
        return f"torch {torch.__version__} is built for ROCm (AMD GPUs are not supported yet), not for CUDA"
    if torch.version.cuda is None:
        release = torch.__version__.partition("+")[0]
        return (
            f"torch {torch.__version__} is built without CUDA; `pip install --force-reinstall torch=={release}` "
            "installs the build with CUDA from PyPI"
        )
    if torch.cuda.is_available():
        return None
    if not NVIDIA_DRIVER.exists():
        return "no NVIDIA driver is loaded; `nvidia-smi` must list a GPU (start a container with --gpus all)"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return f"torch's CUDA {torch.version.cuda} cannot use the driver: {str(error).splitlines()[0]}"
    return "the NVIDIA driver lists no GPU to this process (CUDA_VISIBLE_DEVICES may hide them)"


def _wrong(device: str, wanted: str, limit: str = SUPPORTED) -> ConfigError:
    return ConfigError(
        f"engine.device must be {wanted}, got {device!r}", param="engine.device", limit=limit, value=device
    )
