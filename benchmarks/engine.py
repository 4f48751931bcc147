"""Our engine without Redis: a process that takes points on standard input and answers with figures, a JSON line each.

A point is {"prompts": [[token ids]...], "tokens": N, "sampling": {...}}, or {"prefill": [token ids]};
{"experts": point} counts the experts that a decode step touches.
"""

import argparse
import json
import sys
import time
from itertools import pairwise
from typing import Any

from ktqueue.core.config import EngineConfig
from ktqueue.core.request import SamplingParams
from ktqueue.engine.outputs import EngineStats
from ktqueue.operators.decoder import CpuDecoder
from workers.startup import Built, build

PARTS = ("schedule", "forward", "sample", "commit")


def start(built: Built, point: dict[str, Any]) -> None:
    """Add the rows and step until each has its first token."""
    sampling = SamplingParams(**{"temperature": 0.0, "seed": 7, **point.get("sampling", {})}, ignore_eos=True,
                              max_tokens=point["tokens"])  # fmt: skip
    waiting = set()
    for row, prompt in enumerate(point["prompts"]):
        built.engine.add(str(row), prompt, sampling)
        waiting.add(str(row))
    while waiting:
        waiting -= {output.request_id for output in built.engine.step() if output.token_ids}


def measure(built: Built, point: dict[str, Any]) -> dict[str, float]:
    """Decode with all rows running: tokens a second, milliseconds a step, and the host's share of a step."""
    start(built, point)
    engine = built.engine
    before, tokens, full = engine.stats(), 0, True
    moments = [time.perf_counter()]
    while full:
        outputs = engine.step()
        moments.append(time.perf_counter())
        tokens += sum(len(output.token_ids) for output in outputs)
        full = not any(output.finish_reason for output in outputs)
    seconds = moments[-1] - moments[0]
    after = engine.stats()
    while engine.has_work:
        engine.step()
    steps = after.steps - before.steps
    spent = {part: _seconds(after, part) - _seconds(before, part) for part in PARTS}
    host = sum(spent.values()) - spent["forward"]
    return {
        "tokens_per_second": tokens / seconds,
        "step_ms": 1e3 * seconds / steps,
        "fastest_step_ms": 1e3 * min(later - earlier for earlier, later in pairwise(moments)),
        "host_share": host / seconds,
        **{f"{part}_ms": 1e3 * value / steps for part, value in spent.items()},
    }


def prefill(built: Built, prompt: list[int]) -> dict[str, float]:
    """One prompt alone, to its first token."""
    began = time.perf_counter()
    start(built, {"prompts": [prompt], "tokens": 1})
    seconds = time.perf_counter() - began
    return {"tokens_per_second": len(prompt) / seconds, "step_ms": 1e3 * seconds, "fastest_step_ms": 1e3 * seconds}


def count_experts(built: Built, point: dict[str, Any]) -> float:
    """Distinct experts of a layer that a decode step touches, on average."""
    decoder = built.model.module
    if not isinstance(decoder, CpuDecoder):
        raise SystemExit(f"experts are counted by CpuDecoder; the rules put {type(decoder).__name__} there")
    start(built, point)
    layers, used = decoder.expert_layers_run, decoder.experts_used
    while built.engine.has_work:
        built.engine.step()
    return (decoder.experts_used - used) / (decoder.expert_layers_run - layers)


def _seconds(stats: EngineStats, part: str) -> float:
    return float(getattr(stats, f"{part}_seconds"))


def main() -> None:
    """Serve points until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--threads", type=int, required=True)
    given = parser.parse_args()
    built = build(EngineConfig(model=given.model, threads=given.threads, enable_prefix_caching=False))
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
