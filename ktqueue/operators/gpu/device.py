"""The one question that distinguishes devices.

Everything of a GPU engine also runs on CPU tensors, without streams, graphs and pinned memory.
"""

import torch


def is_gpu(device: torch.device | str) -> bool:
    """Whether `device` is a GPU. Only a GPU runs kernels, has streams, and needs pinned memory for asynchronous copies.

    Raises RuntimeError for a device that torch does not know.
    """
    return torch.device(device).type == "cuda"


def launches_dependents(device: torch.device | str) -> bool:
    """Whether a kernel on `device` can be launched before the one before it has ended."""
    return is_gpu(device) and torch.cuda.get_device_capability(device)[0] >= 9
