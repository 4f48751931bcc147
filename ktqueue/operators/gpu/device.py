"""The one question that distinguishes devices.

Everything of a GPU engine also runs on CPU tensors, without streams, graphs and pinned memory.
"""

import torch


def is_gpu(device: torch.device | str) -> bool:
    """Whether `device` is a GPU. Only a GPU runs kernels, has streams, and needs pinned memory for asynchronous copies.

    Raises RuntimeError for a device that torch does not know.
    """
    return torch.device(device).type == "cuda"
