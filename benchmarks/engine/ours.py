"""Our engine without Redis: a process that takes points on standard input and answers with figures, a JSON line each.

A point is {"prompts": [[token ids]...], "tokens": N, "sampling": {...}}, or {"prefill": [token ids]};
{"experts": point} counts the experts that a decode step touches.
"""

import argparse
import json
import sys
from typing import Any

from ktqueue.bench.engine import finish, measure_decode, measure_prefill, start
from ktqueue.core.config import EngineConfig
from ktqueue.operators.decoder import CpuDecoder
from ktqueue.workers.startup.build import Built, build


def measure(built: Built, point: dict[str, Any]) -> dict[str, float]:
    """Decode with all rows running: tokens a second, milliseconds a step, and the host's share of a step."""
    taken = measure_decode(built.engine, point["prompts"], point["tokens"], **point.get("sampling", {}))
    steps = taken.tokens / taken.rows
    return {
        "tokens_per_second": taken.tokens_per_second,
        "step_ms": 1e3 * taken.seconds / steps,
        "fastest_step_ms": 1e3 * taken.fastest_step,
        "host_share": taken.host_share,
        **{f"{part}_ms": 1e3 * value for part, value in taken.parts.items()},
    }


def prefill(built: Built, prompt: list[int]) -> dict[str, float]:
    """One prompt alone, to its first token."""
    taken = measure_prefill(built.engine, [prompt])
    milliseconds = 1e3 * taken.seconds
    return {
        "tokens_per_second": taken.tokens_per_second,
        "step_ms": milliseconds,
        "fastest_step_ms": milliseconds,
    }


def count_experts(built: Built, point: dict[str, Any]) -> float:
    """Distinct experts of a layer that a decode step touches, on average."""
    decoder = built.model.module
    if not isinstance(decoder, CpuDecoder):
        raise SystemExit(f"experts are counted by CpuDecoder; the rules put {type(decoder).__name__} there")
    start(built.engine, point["prompts"], point["tokens"], point.get("sampling", {}))
    layers, used = decoder.expert_layers_run, decoder.experts_used
    finish(built.engine)
    return (decoder.experts_used - used) / (decoder.expert_layers_run - layers)


def main() -> None:
    """Serve points until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    built = build(EngineConfig(model=arguments.model, threads=arguments.threads, enable_prefix_caching=False))
    for line in sys.stdin:
        point = json.loads(line)
        answer: Any
        if "experts" in point:
            answer = count_experts(built, point["experts"])
        elif "prefill" in point:
            answer = prefill(built, point["prefill"])
        else:
            answer = measure(built, point)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
