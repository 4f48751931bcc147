"""The environment of a figure: software, its versions, CPU and GPU."""

import platform
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from ktqueue import __version__
from ktqueue.operators import native
from ktqueue.workers.startup.machine import cpu_name

PACKAGES = ("torch", "transformers", "triton", "flashinfer-python", "numpy")


def environment() -> dict[str, Any]:
    """Describe the environment as JSON values."""
    return {
        "ktqueue": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "taken": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpu": cpu_name(),
        "threads": native.threads(),
        "isa": native.isa(),
        "gpu": _gpu(),
        "packages": {name: installed_version(name) for name in PACKAGES},
    }


def _gpu() -> dict[str, Any] | None:
    if not torch.cuda.is_available():
        return None
    facts = torch.cuda.get_device_properties(0)
    return {
        "name": facts.name,
        "capability": f"{facts.major}.{facts.minor}",
        "memory": facts.total_memory,
        "cuda": torch.version.cuda,
    }


def installed_version(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
