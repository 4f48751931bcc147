"""What experts in GPU memory are worth, by routing: `python -m benchmarks.gpu.residency TRACE.npz`.

Half of the experts are in GPU memory. Decode runs with random weights, whose routing is uniform, and with weights that
follow the trace. A worker begins with any experts (cold) and moves others in meanwhile (learned). At last it begins
with those that were used most before, as after a restart (known). Each model is loaded once.
"""

import argparse
import gc
from typing import Any

import torch

from benchmarks import machine
from benchmarks.gpu.loaded_gpu_model import GIB, PROMPT_TOKENS, LoadedGpuModel, gpu_command_line
from benchmarks.results import GrowingResult
from ktqueue.bench.engine import measure_decode
from ktqueue.bench.environment import environment
from ktqueue.core.config import EngineConfig
from ktqueue.loading.synthetic.checkpoint import ROUTING
from ktqueue.workers.startup.build import report_of

OUTPUT_TOKENS = 160
LEARNING_ROUNDS = 3  # the last of them is what was learned


def decode(loaded: LoadedGpuModel, rows: int, seed: int, tokens: int = OUTPUT_TOKENS) -> dict[str, Any]:
    """One round: its speed, and where its experts were computed. Counts include the prompts."""
    decoder = loaded.decoder
    before, moves = decoder.expert_work(), decoder.statistics()["expert_moves"]
    figure = measure_decode(loaded.engine, loaded.prompts(rows, seed=seed), tokens)
    work, known = decoder.expert_work().since(before), decoder.statistics()
    return {
        "rows": rows,
        "tokens_per_second": figure.tokens_per_second,
        "step_ms": 1e3 * figure.step,
        "fastest_step_ms": 1e3 * figure.fastest_step,
        "found": work.gpu_uses / work.uses if work.uses else None,
        "moves": known["expert_moves"] - moves,
        "cpu_experts_gb": work.cpu_bytes / 1e9,
        "cpu_experts_s": work.cpu_seconds,
        "bus_gb": work.bus_bytes / 1e9,
        "fetched_share": known[f"expert_fetched_share_{'one' if rows == 1 else 'several'}"],
    }


def measure(loaded: LoadedGpuModel, rows: int, tokens: int = OUTPUT_TOKENS) -> dict[str, dict[str, Any]]:
    """Rounds that begin cold, have learned, and begin with the experts that were used most in the others."""
    decoder = loaded.decoder
    decode(loaded, rows, 0, tokens=2)  # compiles kernels
    uses = decoder.expert_uses()
    assert uses is not None
    decoder.place_experts([[0] * len(layer) for layer in uses])
    rounds = [decode(loaded, rows, seed, tokens) for seed in range(1, 2 + LEARNING_ROUNDS)]
    uses = decoder.expert_uses()
    assert uses is not None
    decoder.place_experts(uses)
    return {"cold": rounds[0], "learned": rounds[-1], "known": decode(loaded, rows, 2 + LEARNING_ROUNDS, tokens)}


def main() -> None:
    parser = gpu_command_line(__doc__, rows="1,4,16")
    parser.add_argument("trace", help="a .npz file of routing")
    parser.add_argument("--share", type=float, default=0.5, help="of the experts that are in GPU memory")
    arguments = parser.parse_args()
    result = GrowingResult(
        arguments.results / "residency.json",
        model=arguments.model,
        share=arguments.share,
        environment=environment(),
        prompt_tokens=PROMPT_TOKENS,
        output_tokens=OUTPUT_TOKENS,
    )
    for routing in ("trace", "uniform"):
        loaded = load(
            arguments, f"{arguments.model}{ROUTING}{arguments.trace}" if routing == "trace" else arguments.model
        )
        for rows in arguments.rows:
            for start, figure in measure(loaded, rows).items():
                result.add({"routing": routing, "start": start, **figure, "dram_gb_s": machine.bandwidth()})
        loaded.engine.close()
        del loaded
        gc.collect()
        torch.cuda.empty_cache()


def load(arguments: argparse.Namespace, model: str) -> LoadedGpuModel:
    """A model with a share of its experts in GPU memory."""
    experts = report_of(EngineConfig(model=model, device="cuda")).movable_bytes
    return LoadedGpuModel(model, max(arguments.rows), 2 * GIB, gpu_expert_memory_bytes=int(arguments.share * experts))


if __name__ == "__main__":
    main()
