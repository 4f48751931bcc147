"""Captured steps with prompts of GpuDecoder compute what eager ones do, for all models that have such steps."""

import itertools
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decoder_families import FAMILIES, SEQUENCES, VOCAB, Cache, make_model, make_planner_for
from few_families import FEW, on_each_device
from latent_families import LATENT_FAMILIES

from ktqueue.engine.batch import Batch
from ktqueue.engine.gpu.graph_capture import GraphCapturer, RepeatedCall
from ktqueue.engine.gpu.graph_runner import GraphRunner
from ktqueue.operators.decoder_facts import DecoderFacts
from ktqueue.operators.gpu.attention.base import AttentionPlanner, AttentionShape
from ktqueue.operators.gpu.attention.latent import LatentPlanner
from ktqueue.operators.gpu.decoder import GpuDecoder
from ktqueue.operators.gpu.experts.memory import captured_tokens
from ktqueue.operators.kv_cache import KVCache, KVLayout
from ktqueue.operators.step import StepContext

ALL = 1 << 40  # bytes
STEPS = [  # chunks of a prompt beside decode rows: (first, last) of each sequence
    {"s0": (0, 4), "s2": (0, 11)},
    {"s2": (11, 12), "s1": (0, 22), "s0": (4, 5)},
    {"s1": (22, 23), "s2": (12, 39)},
    {"s2": (39, 40)},
]
CAPTURED = [family for family, (kind, _) in FAMILIES.items() if not kind.startswith(("qwen3_next", "qwen3_5"))]
CAPTURED += [family for family, (_, sizes) in LATENT_FAMILIES.items() if "index_topk" not in sizes]
FLOAT8 = {"dtype": torch.float8_e4m3fn}
QUANTISED = ("qwen3_moe", "gpt_oss", "gemma4 with experts", "llama4", "deepseek_v2")


def planner_of_captured(layout: KVLayout, facts: DecoderFacts, device: str) -> AttentionPlanner:
    """Make the planner that a worker would make on a GPU for latents, whose kernels run interpreted on a CPU."""
    if layout.latent is None or device == "cuda":
        return make_planner_for(layout, facts, device)
    sizes: Any = {"layout": layout, "heads": facts.heads, "scaling": facts.scaling, "windows": (0,)}
    return LatentPlanner(AttentionShape(**sizes, device=device, dtype=facts.dtype))


class Replayed(Cache):
    """A cache whose steps are replayed by a GraphRunner. They are padded to 20 or 48 tokens."""

    def __init__(self, decoder: GpuDecoder, device: str, **others: Any) -> None:
        super().__init__(decoder, device=device, planner=planner_of_captured, **others)
        self.kv = KVCache(self.kv.layout, self.kv.pages, device, scratch=True)
        capturer = GraphCapturer(device) if device == "cuda" else RepeatedCall()
        sizes: Any = {"buckets": [], "prompts": [20, 48], "max_pages": 12}
        self.runner = GraphRunner(decoder, VOCAB, self.kv, self.planner, capturer, device=device, **sizes)
        self._decoder = self._execute
        self._host: StepContext | None = None

    def _planned(self, host: StepContext, live_tokens: int | None) -> StepContext:
        self._host = host
        return host

    def _execute(self, *, input_ids: Any, position_ids: Any, logits_to_keep: Any, **_: Any) -> Any:
        assert self._host is not None
        batch = Batch(input_ids.cpu(), position_ids.cpu(), logits_to_keep.cpu(), self._host)
        return SimpleNamespace(logits=self.runner.execute(batch)[:].unsqueeze(0))


def errors(decoder: GpuDecoder, device: str, **others: Any) -> list[float]:
    """Feed the sequences to both. Returns the relative error of each scored token, the last of each chunk. In the third
    step none is scored."""
    found: list[float] = []
    with torch.inference_mode():
        replayed = Replayed(decoder, device, **others)
        eager = Cache(decoder, device=device, planner=make_planner_for, **others)
        for number, step in enumerate(STEPS):
            chunks = {name: SEQUENCES[name][first:last] for name, (first, last) in step.items()}
            ends = torch.tensor([len(chunk) for chunk in chunks.values()]).cumsum(0) - 1
            scored = [] if number == 2 else ends.tolist()
            logits, expected = replayed.step(chunks, scored), eager.step(chunks, scored)
            assert logits.shape == expected.shape
            found += ((logits - expected).norm(dim=1) / expected.norm(dim=1)).tolist()
        assert replayed.runner.replayed == 3, "the last step decodes"
    return found


@pytest.mark.parametrize(
    ("family", "device"), on_each_device([family for family in FEW if family in CAPTURED], CAPTURED)
)
def test_replayed_prompts_equal_eager_ones(family: str, make_decoder: Callable[..., Any], device: str) -> None:
    decoder = make_decoder(make_model(family), expert_memory_bytes=ALL)
    assert decoder.most_captured_tokens == 128
    assert max(errors(decoder, device)) < 2e-5


@pytest.mark.parametrize(
    ("family", "dense", "others", "device"),
    on_each_device(
        [(family, *rest) for family in QUANTISED for rest in (("dequantised", {}), ("quantised", FLOAT8))],
        itertools.product(QUANTISED, ("dequantised", "quantised"), ({}, FLOAT8)),
    ),
)
def test_captured_prompts_are_right_with_quantised_weights(
    family: str, dense: str, others: dict[str, Any], make_decoder: Callable[..., Any], device: str
) -> None:
    """The kernels need not be the same, so in half precision a router may choose another expert of equal score."""
    model = make_model(family).to(torch.bfloat16)
    decoder = make_decoder(model, "Q8_0", dense=dense, expert_memory_bytes=ALL)
    assert median(errors(decoder, device, **others)) < 0.1


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_prompts_are_not_captured_with_experts_on_the_cpu(share: float, make_decoder: Callable[..., Any]) -> None:
    model = make_model("qwen3_moe")
    needed = int(make_decoder(model).statistics()["expert_bytes"])
    assert make_decoder(model, expert_memory_bytes=int(share * needed)).most_captured_tokens == 0
    assert make_decoder(make_model("qwen3")).most_captured_tokens == 128


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2"])
def test_replayed_steps_may_decode_experts(
    family: str, make_decoder: Callable[..., Any], device: str, decoded_pairs: list[int]
) -> None:
    """On a GPU, grouped products are for bfloat16 only. Steps of 48 tokens decode experts, with padding among them, and
    eager ones of these tokens do not."""
    model = make_model(family)
    if device == "cuda":
        model = model.to(torch.bfloat16)
    decoder = make_decoder(model, "Q8_0", expert_memory_bytes=ALL, decode_experts_from=40)
    assert decoder.most_captured_tokens == 128
    found = errors(decoder, device)
    assert median(found) < 0.1 if device == "cuda" else max(found) < 2e-5
    assert {*decoded_pairs} == {48} or not decoder._experts._decoded
    assert decoder._experts._decoded or device == "cuda", "an H200 has a grouped product, other GPUs may not"


def test_captured_prompts_take_a_hundredth_of_the_memory() -> None:
    """Of an H200, of a card with 80 GB and of one with 24, for Qwen3-30B-A3B and DeepSeek-V3."""
    sizes = 141 * 10**9, 80 << 30, 24 << 30
    assert [captured_tokens(2048, 8, size) for size in sizes] == [9562, 5825, 2048]
    assert [captured_tokens(7168, 8, size) for size in sizes] == [2732, 2048, 2048]
