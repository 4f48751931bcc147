"""The questions that distinguish devices.

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


def has_large_shared_memory(device: torch.device | str) -> bool:
    """Whether a program on `device` can have 227 KB of shared memory: Hopper and Blackwell, of capability 9 and 10."""
    return is_gpu(device) and torch.cuda.get_device_capability(device)[0] in (9, 10)


def program_bytes(device: torch.device | str) -> int:
    """Shared memory that a program on the GPU `device` may have."""
    # torch's type stubs do not have this property.
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin"))  # noqa: B009


def has_warpgroups(device: torch.device | str) -> bool:
    """Whether `device` is a GPU whose warps multiply four at a time: Hopper, of capability 9.0."""
    return is_gpu(device) and torch.cuda.get_device_capability(device) == (9, 0)


def multiplies_groups(device: torch.device | str) -> bool:
    """Whether `device` is a GPU on which torch multiplies groups of rows in bfloat16 without a wait of the host.

    Those are Hopper and Blackwell, of capability 9 and 10. Others multiply group by group and read their ends on the
    host.
    """
    return is_gpu(device) and torch.cuda.get_device_capability(device)[0] in (9, 10)
