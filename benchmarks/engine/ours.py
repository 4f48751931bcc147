"""Our engine without Redis, as a process that answers questions (see `json_lines`)."""

import argparse
from typing import Any

from benchmarks.json_lines import answer_questions
from ktqueue.bench.engine import finish, measure_decode, measure_prefill, start
from ktqueue.core.config import EngineConfig
from ktqueue.operators.decoder import CpuDecoder
from ktqueue.workers.startup.build import build


class OurEngine:
    """One model on the CPU."""

    def __init__(self, model: str, threads: int) -> None:
        self._built = build(EngineConfig(model=model, threads=threads, enable_prefix_caching=False))

    def decode(self, prompts: list[list[int]], tokens: int, **sampling: Any) -> dict[str, float]:
        """Decode with all rows running: tokens a second, milliseconds a step, and the host's share of a step."""
        measured = measure_decode(self._built.engine, prompts, tokens, **sampling)
        return {
            "tokens_per_second": measured.tokens_per_second,
            "step_ms": 1e3 * measured.seconds * measured.rows / measured.tokens,
            "fastest_step_ms": 1e3 * measured.fastest_step,
            "host_share": measured.host_share,
            **{f"{part}_ms": 1e3 * value for part, value in measured.parts.items()},
        }

    def prefill(self, prompt: list[int]) -> dict[str, float]:
        """One prompt alone, to its first token."""
        measured = measure_prefill(self._built.engine, [prompt])
        milliseconds = 1e3 * measured.seconds
        return {
            "tokens_per_second": measured.tokens_per_second,
            "step_ms": milliseconds,
            "fastest_step_ms": milliseconds,
        }

    def distinct_experts(self, prompts: list[list[int]], tokens: int) -> float:
        """Distinct experts of a layer that a decode step uses, on average."""
        decoder = self._built.model.module
        if not isinstance(decoder, CpuDecoder):
            raise SystemExit(f"experts are counted by CpuDecoder; the rules put {type(decoder).__name__} there")
        start(self._built.engine, prompts, tokens, {})
        layers, used = decoder.expert_layers_run, decoder.experts_used
        finish(self._built.engine)
        return (decoder.experts_used - used) / (decoder.expert_layers_run - layers)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    answer_questions(OurEngine(arguments.model, arguments.threads))
