"""Runs many requests of random shapes through one engine: `python -m tests.soak.endurance [--device cuda]`.

Prompts and completions have random lengths, some share a prefix, some are sampled, some have up to three choices and
some are aborted. The cache is too small for all running rows, so some are preempted. After every 1,000 requests the
engine is empty: all pages must be free, and the memory of device and host, threads and open files are recorded.
Exits with 1 if a page is missing, a request failed, or the last record exceeds the second by more than LEAK allows.
"""

import argparse
import gc
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import command_line
from benchmarks.results import write
from ktqueue.core.config import EngineConfig
from ktqueue.core.request import SamplingParams
from ktqueue.engine.engine import Engine
from ktqueue.workers.startup.build import build

LEAK = {"device_mb": 16.0, "host_mb": 32.0, "threads": 0.0, "files": 0.0}  # what a run may add
DRAWN: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2},
)
ABORTED = 0.1  # of all requests
ALIKE = 0.3  # of all prompts share a prefix with others


def up_to(draw: random.Random, most: int) -> int:
    """Draw a number from 1 to `most`. Each order of magnitude is equally likely."""
    return int(most ** draw.random())


def serve(engine: Engine, vocabulary: int, count: int, longest: int, draw: random.Random, run: str) -> dict[str, int]:
    """Run `count` requests to their end; a few arrive with each step. Returns how many ended in which way."""
    begin = [draw.randrange(vocabulary) for _ in range(longest)]
    ended = {"finished": 0, "aborted": 0, "failed": 0}
    live: dict[str, int] = {}  # choices that have not ended
    added = 0
    while added < count or engine.has_work:
        for _ in range(min(draw.randrange(16), count - added)):
            length = up_to(draw, longest // 2)
            alike = min(length, up_to(draw, longest)) if draw.random() < ALIKE else 0
            prompt = begin[:alike] + [draw.randrange(vocabulary) for _ in range(length - alike)]
            choices = draw.choice((1, 1, 1, 2, 3))
            name = f"{run}-{added}"
            engine.add(
                name,
                prompt,
                SamplingParams(seed=added, n=choices, max_tokens=up_to(draw, longest // 4), **draw.choice(DRAWN)),
            )
            live[name] = choices
            added += 1
        if live and draw.random() < ABORTED:
            name = draw.choice(list(live))
            engine.abort(name)
            del live[name]
            ended["aborted"] += 1
        for output in engine.step(lambda: True):
            if output.finish_reason is None and output.error is None:
                continue
            if output.error is not None:
                sys.stderr.write(f"{output.request_id}: {output.error}\n")
                ended["failed"] += 1
            if output.request_id in live:
                live[output.request_id] -= 1
                if live[output.request_id] == 0:
                    del live[output.request_id]
                    ended["finished"] += 1
    engine.check()
    return ended


def held(device: str) -> dict[str, float]:
    """Return what this process uses: memory in MB (10^6 bytes), threads, open files."""
    gc.collect()
    on_device = 0.0
    if device == "cuda":
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        on_device = (total - free) / 1e6
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "device_mb": on_device,
        "host_mb": int(status["VmRSS"].split()[0]) * 1024 / 1e6,
        "threads": int(status["Threads"]),
        "files": len(list(Path("/proc/self/fd").iterdir())),
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all requests in parts. The first part warms up."""
    built = build(
        EngineConfig(
            model=arguments.model,
            device=arguments.device,
            max_num_seqs=arguments.max_num_seqs,
            max_model_len=arguments.longest,
            num_pages=arguments.longest
            * arguments.max_num_seqs
            // 16
            // 12,  # too few for all rows, so some are preempted
            gpu_expert_memory_bytes=arguments.gpu_expert_memory_bytes if arguments.device == "cuda" else 0,
        )
    )
    engine, draw = built.engine, random.Random(arguments.seed)
    notes: list[dict[str, Any]] = []
    began, done = time.perf_counter(), 0
    while done < arguments.requests:
        count = min(arguments.every, arguments.requests - done)
        ended = serve(engine, built.tokenizer.size, count, arguments.longest, draw, f"run{len(notes)}")
        done += count
        stats = engine.stats()
        notes.append({
            "requests": done, **ended, "missing_pages": stats.total_pages - stats.free_pages,
            "steps": stats.steps, "tokens": stats.generation_tokens, "preemptions": stats.preemptions,
            "prefix_hits": stats.prefix_hits, "prepared_steps": stats.prepared_steps, **held(arguments.device),
        })  # fmt: skip
        sys.stderr.write(f"{notes[-1]}\n")
    seconds = time.perf_counter() - began
    engine.close()
    warm = notes[min(1, len(notes) - 1)]
    leaked = {name: notes[-1][name] - warm[name] for name in LEAK}
    return {"what": "many requests", "device": arguments.device, "seconds": seconds, "leaked": leaked, "notes": notes}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=1_000, help="requests after which the engine is empty")
    parser.add_argument("--longest", type=int, default=512, help="tokens of a prompt and its answer")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--gpu-expert-memory-bytes", type=int, default=8 << 20)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    result = measure(arguments)
    sys.stdout.write(f"{result['leaked']} in {result['seconds']:.0f} s\n")
    write(arguments.results / f"endurance-{arguments.device}.json", result)
    notes = result["notes"]
    sys.exit(
        any(note["missing_pages"] or note["failed"] for note in notes)
        or any(result["leaked"][name] > most for name, most in LEAK.items())
    )


if __name__ == "__main__":
    main()
