"""A random walk over steps of all kinds: whatever came before, logits are those of a decoder that copies nothing."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from decoder_families import VOCAB, Cache, make_model, make_planner_for

from ktqueue.operators.gpu.decoder import GpuDecoder
from ktqueue.operators.gpu.experts.streaming_choice import StreamingChoice
from ktqueue.operators.gpu.handoff.handoff import Handoff, HandoffBuffers

from .test_overlapped_steps import Overlapped, record_bytes

STEPS = 30


class Walk:
    """Takes steps with a decoder and with a plain one, each with a cache of its own."""

    def __init__(self, decoder: GpuDecoder, plain: GpuDecoder, seed: int) -> None:
        self.random = random.Random(seed)
        self.decoder, self.plain = decoder, plain
        self.cache, self.expected = (Cache(each, planner=make_planner_for) for each in (decoder, plain))
        self.names, self.share = 0, 0.5

    def compare(self, cache: Cache, lengths: list[int], scored: list[int] | None, live: int | None = None) -> None:
        """Take a step of new sequences of these lengths. live: see Cache.step."""
        chunks = {}
        for length in lengths:
            self.names += 1
            chunks[str(self.names)] = [self.random.randrange(VOCAB) for _ in range(length)]
        with torch.inference_mode():
            found, expected = (each.step(chunks, scored, live)[:live] for each in (cache, self.expected))
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
        for name in chunks:
            cache.end(name)
            self.expected.end(name)

    def long_step(self) -> None:
        tokens = self.random.randint(9, 40)
        self.compare(
            self.cache, [tokens], self.random.choice([None, [], [tokens - 1], list(range(tokens - 9, tokens))])
        )

    def short_step(self) -> None:
        self.compare(self.cache, [1] * self.random.randint(1, 7), None)

    def padded_step(self) -> None:
        self.compare(self.cache, [1] * self.random.randint(9, 12), None, live=8)

    def overlapped_step(self) -> None:
        self.compare(Cache(Overlapped(self.decoder), planner=make_planner_for), [20], None)
        self.decoder.end_overlap()

    def given_up_step(self) -> None:
        self.share = 0.5  # else the CPU may have nothing to do
        with pytest.raises(RuntimeError, match="given up"):
            self.compare(Cache(GivenUp(self.decoder), planner=make_planner_for), [20], None)
        self.expected = Cache(self.plain, planner=make_planner_for)

    def steps_around_placing(self) -> None:
        self.compare(self.cache, [20], None)
        self.decoder.after_step()
        uses = [[self.random.randrange(1 << 20) for _ in layer] for layer in self.decoder.expert_uses() or ()]
        self.decoder.place_experts(uses)
        self.compare(self.cache, [20], None)

    def another_order(self) -> None:
        memory: Any = self.decoder._experts
        order = memory._placement.order
        order.learn(np.random.default_rng(self.names).integers(0, 1 << 20, order._uses.shape).astype(np.int32))

    def take(self, kinds: dict[str, int]) -> None:
        """A step of a random kind."""
        kind = self.random.choices([*kinds], [*kinds.values()])[0]
        if self.random.random() < 0.4:
            self.share = self.random.choice((0.0, 0.3, 0.5, 0.8, 1.0))
        getattr(self, kind)()
        self.decoder.after_step()


class GivenUp(Overlapped):
    """Fails while the CPU works on the second layer with experts."""

    def __call__(self, *, use_cache: bool, step: Any, **inputs: torch.Tensor) -> Any:
        wait, waits = Handoff.wait, []

        def fail(handoff: Handoff, *arguments: Any) -> None:
            waits.append(arguments)
            if len(waits) == 2:
                raise RuntimeError("given up")
            wait(handoff, *arguments)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Handoff, "wait", fail)
            return self._decoder(**inputs, step=step)


KINDS = {
    "long_step": 8,
    "short_step": 4,
    "padded_step": 2,
    "overlapped_step": 2,
    "given_up_step": 1,
    "steps_around_placing": 2,
    "another_order": 2,
}


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("share", [0.0, 0.4])
@pytest.mark.parametrize("family", ["gemma4 with experts", "qwen2_moe with dense layers"])
def test_each_step_is_as_without_copies(
    family: str, share: float, device: str, make_decoder: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are neither sent nor written hold NaN."""
    buffers = Handoff.buffers

    def poisoned(handoff: Handoff, tokens: int) -> HandoffBuffers:
        found = buffers(handoff, tokens)
        for rows in (found.x, found.weights, found.result):
            rows.fill_(torch.nan)
        return found

    model = make_model(family)
    plain = make_decoder(model)
    settings = {"expert_streaming": "on", "streaming_tokens": 8, "fetched_shares": (0.5, 0.5)}
    decoder = make_decoder(model, expert_memory_bytes=int(share * record_bytes(plain)), **settings)
    walk = Walk(decoder, plain, int(10 * share))
    monkeypatch.setattr(Handoff, "buffers", poisoned)
    monkeypatch.setattr(StreamingChoice, "share", lambda *_: walk.share)
    for _ in range(STEPS):
        walk.take(KINDS)
    assert decoder.statistics()["expert_streamed_steps"] > STEPS // 4
