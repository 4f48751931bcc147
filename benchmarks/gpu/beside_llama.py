"""Our engine beside llama.cpp's programs, on one file and one GPU, in turns: `python -m benchmarks.gpu.beside_llama`.

`--llama DIR` has `llama-bench` and `llama-batched-bench`, built with CUDA. Both decode random tokens, and time neither
sampling nor text, which ours does. Each reads a prompt in one batch of its own size (`--batches`); the faster counts.
With `--cpu-experts`, routed experts are on the CPU, and llama.cpp may still compute those of prompts on the GPU.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.command import integers
from benchmarks.gpu.loaded_gpu_model import GIB, PROMPT_TOKENS, LoadedGpuModel, gpu_command_line
from benchmarks.gpu.trials import CACHE_BYTES, prefill
from benchmarks.results import write
from ktqueue.bench.engine import measure_decode
from ktqueue.bench.environment import environment

OUTPUT_TOKENS = 64


class Turn(NamedTuple):
    """What one engine made in one turn: tokens a second."""

    engine: str
    rows: dict[int, float]
    """By the number of rows that decode at once."""
    prompts: dict[int, float]
    """By the tokens of a prompt that is read alone."""


def json_lines(command: list[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects that a program writes. Raises CalledProcessError if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.stderr.write(done.stderr[-2000:])
        done.check_returncode()
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            yield json.loads(line)


def llama_prompts(arguments: argparse.Namespace) -> dict[int, float]:
    """Tokens a second of prompts that llama.cpp reads alone, by their tokens: the faster of its batch sizes."""
    fastest: dict[int, float] = {}
    for batch in arguments.batches:
        command = [f"{arguments.llama}/llama-bench", "-m", arguments.model, "-fa", "1", *placed(arguments)]
        sizes = ["-b", str(batch), "-ub", str(batch), "-p", ",".join(map(str, arguments.prefill)), "-n", "0"]
        for line in json_lines([*command, *sizes, "-r", str(arguments.rounds), "-o", "jsonl"]):
            tokens = line["n_prompt"]
            fastest[tokens] = max(fastest.get(tokens, 0.0), tokens / (min(line["samples_ns"]) / 1e9))
    return fastest


def llama_rows(arguments: argparse.Namespace) -> dict[int, float]:
    """Tokens a second of rows that llama.cpp decodes at once, by their number."""
    rows = arguments.rows
    command = [f"{arguments.llama}/llama-batched-bench", "-m", arguments.model, "-fa", "on", "-ub", "2048"]
    context = str(max(rows) * (PROMPT_TOKENS + OUTPUT_TOKENS))
    sizes = ["-c", context, "-npp", str(PROMPT_TOKENS), "-ntg", str(OUTPUT_TOKENS), "-npl", ",".join(map(str, rows))]
    lines = json_lines([*command, *sizes, *placed(arguments), "--output-format", "jsonl"])
    return {line["pl"]: line["speed_tg"] for line in lines}


def placed(arguments: argparse.Namespace) -> list[str]:
    """Flags of where llama.cpp keeps its layers and experts."""
    experts = ["-ncmoe", "99"] if arguments.cpu_experts else []
    return ["-ngl", "99", *experts, "-t", str(arguments.threads)]


def ours(loaded: LoadedGpuModel, arguments: argparse.Namespace) -> tuple[dict[int, float], dict[int, float]]:
    """Tokens a second of our rows and prompts."""
    rows = {}
    for number in arguments.rows:
        taken = [measure_decode(loaded.engine, loaded.prompts(number), OUTPUT_TOKENS) for _ in range(arguments.rounds)]
        rows[number] = max(figure.tokens_per_second for figure in taken)
    prompts = {
        tokens: prefill(loaded, tokens, arguments.rounds)["tokens_per_second"] for tokens in arguments.prefill
    }  # fmt: skip
    return rows, prompts


def figures(turns: list[Turn]) -> Iterator[dict[str, Any]]:
    """The medians of all turns, a line for each number of rows and each length of a prompt."""
    for part in ("rows", "prompts"):
        speeds: dict[str, list[dict[int, float]]] = {"ours": [], "llama.cpp": []}
        for turn in turns:
            speeds[turn.engine].append(turn.rows if part == "rows" else turn.prompts)
        for number in speeds["ours"][0] if speeds["llama.cpp"] and speeds["ours"] else ():
            every = {engine: [figure[number] for figure in taken] for engine, taken in speeds.items()}
            medians = {engine: median(taken) for engine, taken in every.items()}
            ratio = medians["ours"] / medians["llama.cpp"]
            yield {"part": part, "number": number, **medians, "ratio": ratio, "every_turn": every}


def main() -> None:
    parser = gpu_command_line(__doc__, rows="1,4,16,64,256")
    parser.add_argument("--llama", required=True, type=Path, help="the folder of llama.cpp's programs")
    parser.add_argument("--prefill", type=integers, default="512,2048,8192", help="tokens of prompts that run alone")
    parser.add_argument("--batches", type=integers, default="512,2048", help="batch sizes of llama.cpp")
    parser.add_argument("--cpu-experts", action="store_true", help="routed experts are on the CPU")
    parser.add_argument("--threads", type=int, default=16, help="of llama.cpp")
    parser.add_argument("--rules", default="both", help="as of a worker; ours alone")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="of each point in a turn; the fastest counts")
    arguments = parser.parse_args()
    memory = 0 if arguments.cpu_experts else 24 * GIB
    loaded = LoadedGpuModel(
        arguments.model, max(arguments.rows), CACHE_BYTES, rules=arguments.rules, gpu_expert_memory_bytes=memory
    )
    result = {
        "format": 1,
        "model": Path(arguments.model).name,
        "rules": arguments.rules,
        "experts": "CPU" if arguments.cpu_experts else "GPU",
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "turns": arguments.turns,
        "environment": environment(),
    }
    turns: list[Turn] = []
    for turn in range(arguments.turns):
        for engine in ("llama.cpp", "ours") if turn % 2 == 0 else ("ours", "llama.cpp"):
            rows, prompts = (
                ours(loaded, arguments) if engine == "ours" else (llama_rows(arguments), llama_prompts(arguments))
            )
            turns.append(Turn(engine, rows, prompts))
            sys.stderr.write(f"{turns[-1]}\n")
        name = f"beside-llama-{'cpu-experts' if arguments.cpu_experts else 'on-gpu'}.json"
        write(arguments.results / name, {**result, "figures": list(figures(turns))})
    loaded.engine.close()


if __name__ == "__main__":
    main()
