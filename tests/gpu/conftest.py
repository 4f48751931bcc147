"""What tests of the engine of a GPU share."""

from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from ktqueue.engine import scheduler
from ktqueue.operators import native


@pytest.fixture
def small_steps_overlap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 8 tokens are overlapped. Tests on a device are skipped where there is none."""
    if torch.cuda.is_available():
        native.set_threads()
    monkeypatch.setattr(scheduler, "LEAST_OVERLAPPED", 8)
    if "cuda" in request.node.name and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")


@pytest.fixture(scope="session")
def by_decoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of rules that select GpuDecoder on any device."""
    rules = tmp_path_factory.mktemp("rules") / "rules.yaml"
    rules.write_text("- match: {class: 'ForCausalLM$'}\n  replace: {op: GpuDecoder, activations: float32}\n")
    return str(rules)


@pytest.fixture(scope="session")
def small_experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a random model of three layers with experts and 512 tokens."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 64,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "eos_token_id": None, "bos_token_id": None,
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    made: Any = Qwen3MoeForCausalLM
    made(Qwen3MoeConfig(**sizes)).float().save_pretrained(folder)
    return str(folder)
