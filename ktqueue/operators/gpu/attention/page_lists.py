"""The page tables of a step as lists without gaps, and one pinned buffer that takes them to the device without waiting.

All of this is host work on small int32 arrays.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ktqueue.operators.gpu.device import is_gpu
from ktqueue.operators.step import StepContext

Indices = npt.NDArray[np.int32]
ALIGNMENT = 4
"""Elements. Arrays that go to the device together begin at multiples of it."""


@dataclass(frozen=True, slots=True)
class PageLists:
    """The rows of one step.

    starts: [rows + 1], the first page of each row in `pages`. pages: [starts[-1]], row after row. contexts: [rows],
    keys of each row. last: [rows], keys in the last page of each row, at least 1.
    """

    starts: Indices
    pages: Indices
    contexts: Indices
    last: Indices


def page_lists(host: StepContext, page_size: int) -> PageLists:
    """List the pages that the rows of `host` (CPU tensors) use. Raises ValueError for a row without keys."""
    contexts: Indices = host.context_lengths.numpy()
    table: Indices = host.page_table.numpy()
    if len(contexts) == 0 or contexts.min() < 1:
        raise ValueError("every row of a step has at least one key")
    counts = (contexts + (page_size - 1)) // page_size
    if counts.max() > table.shape[1]:
        raise ValueError(f"the page table has {table.shape[1]} pages per row, a row of the step needs {counts.max()}")
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    pages = table[np.arange(table.shape[1]) < counts[:, None]]
    return PageLists(starts, pages, contexts, contexts - (counts - 1) * page_size)


def one_page_each(rows: int) -> PageLists:
    """The lists of `rows` rows of length 1 on page 0, for which decode plans are made."""
    ones = np.ones(rows, dtype=np.int32)
    return PageLists(np.arange(rows + 1, dtype=np.int32), ones * 0, ones, ones)


def check_decode_step(host: StepContext, rows: int, max_pages: int, page_size: int) -> None:
    """Raise ValueError unless `host` has `rows` rows of one token each and at most `max_pages` pages."""
    step_rows, tokens = len(host.context_lengths), len(host.slot_mapping)
    if step_rows != rows or tokens != rows:
        raise ValueError(f"this decode plan is for {rows} rows of one token, not {step_rows} rows of {tokens} tokens")
    longest = int(host.context_lengths.max())
    if longest > max_pages * page_size:
        raise ValueError(f"this decode plan is for rows of {max_pages} pages of {page_size} keys, not {longest} keys")


def prompt_step_fits(host: StepContext, rows: int, tokens: int, max_pages: int, page_size: int) -> bool:
    """Whether `host` has at most so many rows, tokens in all and pages of a row."""
    fits = len(host.context_lengths) <= rows and len(host.slot_mapping) <= tokens
    return fits and int(host.context_lengths.max()) <= max_pages * page_size


def check_prompt_step(host: StepContext, rows: int, tokens: int, max_pages: int, page_size: int) -> None:
    """Raise ValueError unless `prompt_step_fits`."""
    if not prompt_step_fits(host, rows, tokens, max_pages, page_size):
        step_rows, step_tokens, longest = len(host.context_lengths), len(host.slot_mapping), host.context_lengths.max()
        raise ValueError(
            f"this plan is for {rows} rows, {tokens} tokens and {max_pages} pages of {page_size} keys at most, not for "
            f"{step_rows} rows, {step_tokens} tokens and {longest} keys"
        )


def staged(arrays: list[Indices], device: torch.device) -> tuple[torch.Tensor, list[int]]:
    """Put the arrays into one host tensor [elements] int32, pinned if it is for a GPU. Returns it and their offsets.

    Each array begins at a multiple of 16 bytes, so that kernels always see the same alignment. The tensor is new each
    time, because an earlier copy may not be finished: torch reuses pinned memory once the copies from it are done.
    """
    offsets, size = [], 0
    for array in arrays:
        offsets.append(size)
        size += -(-array.size // ALIGNMENT) * ALIGNMENT
    host = torch.empty(size, dtype=torch.int32, pin_memory=is_gpu(device))
    view = host.numpy()
    for array, offset in zip(arrays, offsets, strict=True):
        view[offset : offset + array.size] = array.reshape(-1)
    return host, offsets


def views_of(packed: torch.Tensor, arrays: list[Indices], offsets: list[int]) -> list[torch.Tensor]:
    """The part of `packed` [elements] that belongs to each array, as `staged` has put them there."""
    return [packed[offset : offset + array.size] for array, offset in zip(arrays, offsets, strict=True)]


def sent(arrays: list[Indices], device: torch.device) -> list[torch.Tensor]:
    """Copy the arrays to the device in one piece, without waiting. Returns them flat, [size] int32 each."""
    host, offsets = staged(arrays, device)
    return views_of(host.to(device, non_blocking=True), arrays, offsets)
