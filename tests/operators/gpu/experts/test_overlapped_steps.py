"""A step that others overlap: it streams all experts, leaves the CPU to the others, and leaves nothing behind."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from decoder_families import Cache, make_model, make_planner_for

from ktqueue.operators.gpu.copy_stream import Copy, CopyStream
from ktqueue.operators.gpu.decoder import GpuDecoder
from ktqueue.operators.gpu.device import multiplies_groups
from ktqueue.operators.gpu.experts import memory
from ktqueue.operators.gpu.experts.placement import READ_EVERY_STEPS
from ktqueue.operators.step import DecoderOutput, StepInputs, result_of

PROMPT = [3, 4, 5, 3, 4, 9, 8, 7]
LAYERS = 2


def record_bytes(decoder: GpuDecoder) -> int:
    """Bytes of all routed experts in GPU format."""
    return int(decoder.statistics()["expert_bytes"])


class Overlapped:
    """Calls a decoder as a step that others overlap. parts: launched of each step; None: all."""

    def __init__(self, decoder: GpuDecoder, parts: int | None = None) -> None:
        self.facts, self.rotary = decoder.facts, decoder.rotary
        self._decoder, self._parts = decoder, parts

    def __call__(self, *, use_cache: bool, step: Any, **inputs: torch.Tensor) -> DecoderOutput:
        launched = self._decoder.forward_in_parts(StepInputs(**inputs, step=step), overlapped=True)
        if self._parts is None:
            return DecoderOutput(self._decoder.logits(result_of(launched))[None])
        for _ in range(self._parts):
            next(launched)
        return DecoderOutput(torch.zeros(1, 1, 1))


def logits(decoder: Any, device: str) -> torch.Tensor:
    """Logits [tokens, vocabulary] of a prompt."""
    with torch.inference_mode():
        return Cache(decoder, device=device, planner=make_planner_for).step({"s0": PROMPT})


def assert_overlapped_equals(decoder: GpuDecoder, expected: torch.Tensor) -> None:
    """Compute a step that streams all experts, without the CPU, and compare its logits."""
    before = decoder.expert_layers_run
    torch.testing.assert_close(logits(Overlapped(decoder), decoder.device), expected, atol=1e-4, rtol=1e-4)
    assert decoder.expert_layers_run == before
    decoder.end_overlap()
    decoder.after_step()


def test_an_overlapped_step_leaves_the_cpu_alone_while_experts_move(make_decoder: Callable[..., Any]) -> None:
    """An expert on its way to the GPU has no slot yet, and the one that it replaces has none any more."""
    model = make_model("qwen3_moe", num_hidden_layers=LAYERS)
    plain = make_decoder(model)
    decoder = make_decoder(model, expert_memory_bytes=record_bytes(plain) // 3, expert_streaming="on")
    expected = logits(plain, plain.device)
    moves, seen = 0, 0
    for _ in range(8 * READ_EVERY_STEPS):
        logits(decoder, decoder.device)
        decoder.after_step()
        if moves != (moves := int(decoder.statistics()["expert_moves"])):
            assert_overlapped_equals(decoder, expected)
            seen += 1
    assert seen


@pytest.mark.parametrize("absent", [1, LAYERS])
def test_an_overlapped_step_leaves_the_cpu_alone_where_one_layer_is_on_the_gpu(
    absent: int, make_decoder: Callable[..., Any]
) -> None:
    model = make_model("qwen3_moe", num_hidden_layers=LAYERS)
    plain = make_decoder(model)
    held = record_bytes(plain) - absent * record_bytes(plain) // int(plain.statistics()["experts"])
    decoder = make_decoder(model, expert_memory_bytes=held, expert_streaming="on")
    assert decoder.statistics()["experts_on_gpu"] == decoder.statistics()["experts"] - absent
    assert_overlapped_equals(decoder, logits(plain, plain.device))


class LateCopies(CopyStream):
    """Copies that happen when the host waits for them, as late as a GPU may do it."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.queued: list[Copy] = []

    def copy(self, copies: Iterable[Copy]) -> None:
        self.queued += copies

    def finish(self) -> None:
        super().copy(self.queued)
        self.queued.clear()


@pytest.mark.parametrize("device", ["cpu"])  # where copies can be late at will
def test_a_step_that_is_given_up_leaves_no_copies_behind(
    device: str, make_decoder: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short steps fetch experts to the memory that it copies to."""
    monkeypatch.setattr(memory, "CopyStream", LateCopies)
    decoder = make_decoder(make_model("qwen3_moe"), expert_streaming="on")
    logits(Overlapped(decoder, parts=1), device)
    copies = decoder._experts._copies
    assert copies.queued
    decoder.end_overlap()
    assert not copies.queued


def test_interactive_steps_move_no_experts_beside_another(make_decoder: Callable[..., Any]) -> None:
    """The overlapped step has copied their places."""
    model = make_model("qwen3_moe", num_hidden_layers=LAYERS)
    plain = make_decoder(model)
    decoder = make_decoder(model, expert_memory_bytes=record_bytes(plain) // 3, expert_streaming="on")
    expected = logits(plain, plain.device)

    def run_steps() -> int:
        for _ in range(4 * READ_EVERY_STEPS):
            torch.testing.assert_close(logits(decoder, decoder.device), expected, atol=1e-4, rtol=1e-4)
            decoder.after_step()
        return int(decoder.statistics()["expert_moves"])

    logits(Overlapped(decoder, parts=1), decoder.device)
    assert run_steps() == 0
    decoder.end_overlap()
    assert run_steps() > 0


def test_steps_beside_an_overlapped_one_decode_no_experts(make_decoder: Callable[..., Any]) -> None:
    """The overlapped step decodes its own to that memory."""
    model = make_model("qwen3_moe", num_hidden_layers=LAYERS).to(torch.bfloat16)
    settings = {"decode_experts_from": len(PROMPT), "expert_streaming": "on", "streaming_tokens": 64}
    decoder = make_decoder(model, expert_memory_bytes=record_bytes(make_decoder(model)) // 2, **settings)
    if decoder.device == "cuda" and not multiplies_groups("cuda"):
        pytest.skip("this GPU decodes no experts")
    decoded = decoder._experts._decoded.memory.fill_(7)
    logits(Overlapped(decoder, parts=1), decoder.device)
    logits(decoder, decoder.device)
    assert (decoded == 7).all()
    decoder.end_overlap()
    logits(decoder, decoder.device)
    assert not (decoded == 7).all()
