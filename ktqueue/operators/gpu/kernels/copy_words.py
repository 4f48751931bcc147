"""A copy of a few kilobytes between pinned host memory and a GPU, by a kernel instead of the copy engine.

A stream that goes from kernels to the copy engine and back waits some microseconds each time, which is more than such a
copy takes. Large copies are the engine's.
"""

import torch

from ktqueue.operators.gpu.kernels.operation import (
    early_launch_options,
    runs_kernel,
    tl,
    triton,
    wait_for_previous,
)

MOST_BYTES = 1 << 18
"""That a kernel copies. The copy engine is faster beyond."""
_WORDS = 1024
"""Of a program, 4 bytes each."""


@triton.jit(do_not_specialize=["words"])
def _copy_words_kernel(source, target, words, BLOCK: tl.constexpr, WAITS: tl.constexpr):
    """One program for BLOCK words."""
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = word < words
    wait_for_previous(WAITS)
    # The host changes the words between two launches, so no cache may have kept them.
    tl.store(target + word, tl.load(source + word, mask=inside, other=0, cache_modifier=".cv"), mask=inside)


def copy_words(source: torch.Tensor, target: torch.Tensor) -> None:
    """Queue a copy on the current stream. The host does not wait.

    source, target: dense, of equal size and type, whose bytes are a multiple of 4. One of them is on the device, the
    other in pinned memory of the host.
    """
    on_device = target if target.device.type != "cpu" else source
    if not runs_kernel(on_device) or source.nbytes > MOST_BYTES:
        target.copy_(source, non_blocking=True)
        return
    source, target = source.view(torch.int32), target.view(torch.int32)
    words = source.numel()
    if words:
        _copy_words_kernel[(triton.cdiv(words, _WORDS),)](
            source, target, words, BLOCK=_WORDS, **early_launch_options(on_device)
        )
