"""The demo model as GpuDecoder, loaded by rule from its file, chooses the greedy tokens that CpuDecoder chooses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_families import Cache, make_planner_for

from ktqueue.loading.load import load_model
from ktqueue.operators.gpu.decoder import GpuDecoder
from ktqueue.operators.gpu.settings import GpuSettings

EXACT = Path(__file__).parents[3] / "rules" / "exact.yaml"  # activations stay float32
PROMPTS = [[5, 77, 301, 14], list(range(20, 60)), [9], list(range(100, 117))]
NEW_TOKENS = 12


def greedy(model: Any, device: str, planner: Any = None) -> list[list[int]]:
    """The continuations of all prompts, in one batch."""
    cache = Cache(model, device=device, planner=planner)
    names = [str(i) for i in range(len(PROMPTS))]
    chunks = dict(zip(names, PROMPTS, strict=True))
    ends = torch.tensor([len(prompt) for prompt in PROMPTS]).cumsum(0).sub(1).tolist()
    found: list[list[int]] = [[] for _ in PROMPTS]
    with torch.inference_mode():
        for _ in range(NEW_TOKENS):
            tokens = cache.step(chunks, ends).argmax(-1).tolist()
            for continuation, token in zip(found, tokens, strict=True):
                continuation.append(token)
            chunks, ends = {name: [token] for name, token in zip(names, tokens, strict=True)}, list(range(len(names)))
    return found


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return greedy(load_model("demo", rules=str(EXACT)).module, "cpu")


@pytest.mark.parametrize(("share", "streaming"), [(0.0, "on"), (0.5, "off"), (0.5, "on"), (1.0, "off")])
def test_greedy_tokens_equal_those_of_the_cpu(
    device: str, share: float, streaming: Any, expected: list[list[int]], tmp_path: Path
) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("- match: {class: 'ForCausalLM$'}\n  replace: {op: GpuDecoder, activations: float32}\n")
    model = load_model("demo", rules=str(rules), device=device).module
    assert isinstance(model, GpuDecoder)
    everything = 2 * model.device_bytes()["cpu"]
    memory = {0.0: 0, 0.5: everything // 4, 1.0: everything}[share]
    settings = GpuSettings(max_tokens=128, expert_memory_bytes=memory, expert_streaming=streaming, streaming_tokens=16)
    model.prepare_device(settings)
    found = greedy(model, device, make_planner_for)
    model.after_step()
    model.close()
    assert found == expected
