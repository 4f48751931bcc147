"""The measurement of experts in GPU memory, on tensors of the CPU, and its page."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from device_engine import on_device

from benchmarks.gpu import page
from benchmarks.gpu.residency import measure
from ktqueue.bench.engine import prompts
from ktqueue.core.config import EngineConfig
from ktqueue.loading.load import load_model

RULES = """
- match: {class: 'ForCausalLM$'}
  replace: {op: GpuDecoder, activations: float32}
"""
EXPERTS, CHOSEN = 8, 2


def test_experts_are_found_after_moves_and_at_once_if_they_are_known(tmp_path: Path) -> None:
    """The tokens use the experts 4 to 7 only, and the first slots have the others."""
    draw = np.random.default_rng(0)
    few = EXPERTS // 2 + np.argsort(draw.random((8, 128, 2, EXPERTS // 2)), axis=-1)[..., :CHOSEN]
    np.savez(tmp_path / "routing.npz", a=few.astype(np.uint8))
    (tmp_path / "rules.yaml").write_text(RULES)
    name = f"synthetic:tiny:q8_0:2:routing={tmp_path / 'routing.npz'}"
    model = load_model(name, rules=str(tmp_path / "rules.yaml"))
    experts = sum(layer.packed.bytes for layer in model.module._routed)  # type: ignore[union-attr]
    config = EngineConfig(
        model=name, dtype="float32", num_pages=200, max_num_seqs=2, max_num_batched_tokens=256,
        max_model_len=256, gpu_expert_memory_bytes=int(0.55 * experts), expert_streaming="off",
    )  # fmt: skip
    engine = on_device(model, config)
    size = model.card_facts.vocab_size
    on_cpu: Any = SimpleNamespace(
        engine=engine, decoder=model.module, prompts=lambda rows, seed: prompts(rows, 16, size, seed=seed)
    )
    figures = measure(on_cpu, 2, tokens=40)
    engine.close()
    cold, learned, known = (figures[start] for start in ("cold", "learned", "known"))
    assert cold["moves"] > 0 == learned["moves"] == known["moves"]
    assert cold["found"] < learned["found"] == known["found"] == 1.0
    assert cold["cpu_experts_gb"] > 0 == learned["cpu_experts_gb"] == known["cpu_experts_gb"]


def test_a_page_has_each_routing_and_start() -> None:
    row = {"rows": 1, "tokens_per_second": 100.0, "step_ms": 10.0, "fastest_step_ms": 9.0, "found": 0.9, "moves": 3.0}
    row |= {"cpu_experts_gb": 1.5, "cpu_experts_s": 0.5, "bus_gb": 0.2, "fetched_share": 0.25, "dram_gb_s": 120.0}
    environment = {"gpu": {"name": "a GPU"}, "cpu": "a CPU", "threads": 16}
    lines = page.residency(
        {
            "model": "m", "share": 0.5, "output_tokens": 160, "prompt_tokens": 128, "environment": environment,
            "machine": {"commit": "abc", "taken": "today"}, "command": "c",
            "figures": [{"routing": "trace", "start": "known", **row}, {"routing": "uniform", "start": "cold", **row,
                         "found": None}],
        }
    )  # fmt: skip
    assert lines[-2] == "| trace | known | 1 | 100.0 | 10.00 ms | 9.00 ms | 90.0% | 3 | 1.5 | 0.50 | 0.2 | 25% | 120 |"
    assert lines[-1].startswith("| uniform | cold | 1 | 100.0 | 10.00 ms | 9.00 ms | - |")
