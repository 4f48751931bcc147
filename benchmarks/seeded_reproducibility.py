"""How often float noise changes a seeded sample: alone, among 31 others, after a preemption; and where it is from.

`python -m benchmarks.seeded_reproducibility --requests 2000` prints one JSON object. Sampling noise itself is a
function of seed and position, so a changed token means that the logits differed and the draw fell between.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ktqueue.core.config import EngineConfig
from ktqueue.core.request import SamplingParams
from ktqueue.engine.engine import Engine
from ktqueue.workers.startup import Built, build

PAGE_SIZE = 16
LARGEST_BATCH = 512
TEXT = (
    "Once upon a time there was a king who had three sons, and the youngest was called the simpleton. One day an old "
    "woman came to the gate and asked for bread. In the forest there stood a little house, and in the house there sat"
)


def make_prompts(built: Built, count: int) -> list[list[int]]:
    """Different prompts of 4 to 40 tokens."""
    noise = random.Random(0)
    ids = built.tokenizer.encode(TEXT)
    prompts = []
    for _ in range(count):
        start = noise.randrange(len(ids) - 4)
        prompts.append(ids[start : start + noise.randint(4, 40)])
    return prompts


def generate(
    built: Built, prompts: Sequence[list[int]], tokens: int, *, rows: int, pages: int, budget: int
) -> tuple[list[list[int]], int]:
    """Token ids of each prompt, seeded by its place, at most `rows` at a time; and how often one was preempted."""
    config = EngineConfig(
        max_num_seqs=rows, max_num_batched_tokens=budget, page_size=PAGE_SIZE, enable_prefix_caching=False
    )
    engine = Engine(built.model.module, built.tokenizer, built.model.kv_layout(PAGE_SIZE), config, pages, 1024)
    found: list[list[int]] = [[] for _ in prompts]
    waiting = list(range(len(prompts)))
    while waiting or engine.has_work:
        while waiting and engine.free_seqs:
            place = waiting.pop(0)
            sampling = SamplingParams(temperature=0.8, top_p=0.95, seed=place, max_tokens=tokens, ignore_eos=True)
            engine.add(str(place), prompts[place], sampling)
        for output in engine.step():
            found[int(output.request_id)] += output.token_ids
    return found, engine.stats().preemptions


def compare(expected: list[list[int]], found: list[list[int]]) -> dict[str, Any]:
    """How many requests differ, and at which token the first difference is."""
    firsts = [
        next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
        for one, other in zip(expected, found, strict=True)
        if one != other
    ]
    return {"requests": len(expected), "different": len(firsts), "first_differences": sorted(firsts)[:20]}


def layer_noise(built: Built) -> dict[str, Any]:
    """Of each shape of dense layer: batch sizes at which a row's output is not, to the bit, what it is among 512."""
    torch.manual_seed(0)
    shapes: dict[str, torch.Tensor] = {}
    for name, module in built.model.module.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.dim() == 2 and not isinstance(module, nn.Embedding):
            shapes.setdefault(f"{name.rsplit('.', 1)[-1]} {list(weight.shape)}", weight)
    result = {}
    for name, weight in shapes.items():
        inputs = torch.randn(LARGEST_BATCH, weight.shape[1])
        with torch.inference_mode():
            expected = nn.functional.linear(inputs, weight)
            different = []
            worst = 0.0
            for rows in range(1, 65):
                found = nn.functional.linear(inputs[:rows], weight)
                if not torch.equal(found, expected[:rows]):
                    different.append(rows)
                    worst = max(worst, float((found - expected[:rows]).abs().max()))
        result[name] = {"batches_that_differ": different, "largest_difference": worst}
    return result


def main() -> None:
    """Run the three ways and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--threads", type=int, default=None)
    given = parser.parse_args()
    built = build(EngineConfig(model=given.model, threads=given.threads))
    prompts = make_prompts(built, given.requests)
    alone, _ = generate(built, prompts, given.tokens, rows=1, pages=256, budget=512)
    again, _ = generate(built, prompts[:100], given.tokens, rows=1, pages=256, budget=512)
    crowd, _ = generate(built, prompts, given.tokens, rows=32, pages=2048, budget=512)
    chunks, _ = generate(built, prompts, given.tokens, rows=32, pages=2048, budget=40)
    short, preemptions = generate(built, prompts, given.tokens, rows=32, pages=24, budget=512)
    report = {
        "alone again": compare(alone[:100], again),
        "among 31 others": compare(alone, crowd),
        "among 31 others, prompts in chunks": compare(alone, chunks),
        "after preemptions": {**compare(alone, short), "preemptions": preemptions},
        "crowd against its chunks": compare(crowd, chunks),
        "crowd against its preempted": compare(crowd, short),
        "dense layers": layer_noise(built),
    }
    sys.stdout.write(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
