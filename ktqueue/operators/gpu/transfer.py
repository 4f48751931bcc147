"""Rows between a device and the memory of the hand-off's slots, enqueued on the current stream. Knows no signals.

A task's input goes to the CPU in one piece: packed on the device and copied ("copy"), or written by the packing kernel
straight into the pinned memory, which the device sees ("mapped"; needs Triton). At a row or two what counts is how many
operations there are, not their bytes. Results come back in the same way: many rows too are fetched by a kernel, since
a copy would queue behind those of experts that are streamed meanwhile, on the one engine for that direction.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Literal, NamedTuple

import torch

from ktqueue.operators.native_handoff import SlotMemory

TransferMethod = Literal["auto", "copy", "mapped"]


class Packed(NamedTuple):
    """A task's input as three views of one memory: ids [tokens, k] int64, weights [tokens, k] float32,
    x [tokens, hidden] float32."""

    ids: torch.Tensor
    weights: torch.Tensor
    x: torch.Tensor

    @classmethod
    def of(cls, memory: torch.Tensor, tokens: int, experts_per_token: int, hidden: int, x_offset: int) -> "Packed":
        """memory: [bytes] uint8, laid out as csrc/handoff.h says."""
        pairs = tokens * experts_per_token
        return cls(
            memory[: 8 * pairs].view(torch.int64).view(tokens, experts_per_token),
            memory[8 * pairs : 12 * pairs].view(torch.float32).view(tokens, experts_per_token),
            memory[x_offset : x_offset + 4 * tokens * hidden].view(torch.float32).view(tokens, hidden),
        )


def pack(target: Packed, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, fused: bool) -> None:
    """Fill `target` from ids [tokens, k] int64, weights [tokens, k] float32 and x [tokens, hidden] of any float dtype.

    `fused`: by one Triton kernel, which also writes to pinned memory; else by three copies.
    """
    if fused:
        from ktqueue.operators.gpu import triton_handoff

        triton_handoff.pack(target.x, target.ids, target.weights, x, ids, weights)
        return
    target.ids.copy_(ids, non_blocking=True)
    target.weights.copy_(weights, non_blocking=True)
    target.x.copy_(x, non_blocking=True)


class Transfer:
    """Moves rows for `slots`. On the CPU there is nothing between the two but a copy into the slot's input.

    Raises ValueError if "mapped" is asked for without Triton.
    """

    def __init__(
        self,
        slots: Sequence[SlotMemory],
        experts_per_token: int,
        device: torch.device,
        method: TransferMethod,
    ) -> None:
        self._slots = slots
        self._experts_per_token = experts_per_token
        self._on_device = device.type != "cpu"
        self._fused = self._on_device and find_spec("triton") is not None
        if method == "mapped" and not self._fused:
            raise ValueError("transfer cannot be 'mapped' without a GPU and Triton")
        self._mapped = self._fused and method != "copy"
        self._staging, self._returned = [], [one.out for one in slots]
        if self._on_device:
            self._returned = [torch.empty_like(one.out, device=device, pin_memory=False) for one in slots]
            if not self._mapped:
                self._staging = [torch.empty_like(one.input, device=device, pin_memory=False) for one in slots]

    def put(self, slot: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, x_offset: int) -> None:
        """The input of a task: G1 of csrc/handoff.h."""
        tokens, hidden = x.shape
        memory = self._staging[slot] if self._staging else self._slots[slot].input
        target = Packed.of(memory, tokens, self._experts_per_token, hidden, x_offset)
        pack(target, x, ids, weights, fused=self._fused)
        if self._staging:
            size = x_offset + 4 * tokens * hidden
            self._slots[slot].input[:size].copy_(memory[:size], non_blocking=True)

    def take(self, slot: int, tokens: int) -> torch.Tensor:
        """The output of a task, [tokens, hidden] float32 on the device: G5 of csrc/handoff.h."""
        source, target = self._slots[slot].out[:tokens], self._returned[slot][:tokens]
        if self._mapped:
            from ktqueue.operators.gpu import triton_handoff

            triton_handoff.fetch(source, target)
        elif self._on_device:
            target.copy_(source, non_blocking=True)
        return target
