"""Decode and prefill of our engine, and of llama.cpp beside it on the same file, point by point in turns."""

import argparse
from contextlib import ExitStack
from functools import partial
from random import Random
from typing import Any

from benchmarks import machine
from benchmarks.engine.footprint import of_file
from benchmarks.peer import Peer, start_llama, start_ours
from ktqueue.bench.machine import Probes
from ktqueue.loading.model_path import resolve
from ktqueue.loading.tokenizer.tokenizer import load_tokenizer

PROMPTS = (
    "Tell me a story about a fox and a crow who lived at the edge of a deep forest, and of the old woman who fed them "
    "both through a long and bitter winter until",
    "Once upon a time there was a poor miller who had three sons, and when he came to die he left them nothing but his "
    "mill, his ass, and his cat. The eldest took the",
    "There was once a king whose daughter was so proud that no suitor was good enough for her; she sent one after "
    "another away, and laughed at them as well, and so",
    "In a village by the sea lived a fisherman and his wife in a hut that was no better than an old kettle, and every "
    "day the man went out to fish, and he fished and",
)
PROMPT_TOKENS = 32
EXPERT_TOKENS = 24  # decoded while distinct experts are counted
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "seed": 11}
OURS = "ktqueue"
Point = tuple[int, str, dict[str, Any]]  # rows, and the question
LLAMA = {"llama.cpp repack": True, "llama.cpp no-repack": False}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all points, `arguments.rounds` times in turns."""
    path = resolve(arguments.model)
    tokenizer = load_tokenizer(arguments.model)
    beginnings = [tokenizer.encode(text)[: PROMPT_TOKENS - 1] for text in PROMPTS]
    # Rows differ by their last token, so that they do not all say the same.
    prompts = {rows: [[*beginnings[i % len(PROMPTS)], 300 + i] for i in range(rows)] for rows in arguments.rows}
    draw = Random(5)
    long_prompt = [draw.randrange(tokenizer.size) for _ in range(arguments.prefill)]
    points: list[Point] = [(n, "decode", {"prompts": prompts[n], "tokens": arguments.tokens}) for n in prompts]
    points += [(0, "prefill", {"prompt": long_prompt})] if long_prompt else []
    footprint = of_file(path)
    figures: list[dict[str, Any]] = []
    with ExitStack() as stack:
        ours = stack.enter_context(start_ours(path, arguments.threads))
        peers: dict[str, Peer] = {OURS: ours}
        versions: dict[str, str] = {}
        if arguments.llama_python:
            for name, repack in LLAMA.items():
                process = start_llama(arguments.llama_python, path, arguments.threads, max(prompts), repack=repack)
                peers[name] = stack.enter_context(process)
                versions |= process.hear()
        for peer in peers.values():  # wake threads and caches
            for _, method, question in (points[0], points[-1]):
                peer.ask(method, **question)
        probes, processes = Probes(), [peer.process_id for peer in peers.values()]

        def take(peer: Peer, method: str, question: dict[str, Any]) -> dict[str, Any]:
            before = machine.bandwidth(probes)
            figure = machine.watch(partial(peer.ask, method, **question), processes)
            return {**figure, "bandwidth_gb_s": max(before, machine.bandwidth(probes))}

        for turn in range(arguments.rounds):
            for rows, method, question in points:
                for name, peer in peers.items():
                    figures.append({"peer": name, "rows": rows, "round": turn, **take(peer, method, question)})
                if arguments.sampled and rows:
                    figure = take(ours, method, {**question, **SAMPLED})
                    figures.append({"peer": f"{OURS} sampled", "rows": rows, "round": turn, **figure})
        distinct = {rows: ours.ask("distinct_experts", prompts=prompts[rows], tokens=EXPERT_TOKENS) for rows in prompts}
    return {
        "what": "the whole step with all rows running, greedy unless said; a prompt alone where rows are 0",
        "model": path.name,
        "prompt_tokens": PROMPT_TOKENS,
        **{name: getattr(arguments, name) for name in ("tokens", "prefill", "threads", "rounds")},
        "sampling": SAMPLED,
        "versions": versions,
        "figures": figures,
        "experts_of_layer": footprint.experts,
        "distinct_experts": {str(rows): count for rows, count in distinct.items()},
        "step_bytes": {str(rows): footprint.step_bytes(count) for rows, count in distinct.items()},
        "weights_of_token": footprint.weights,
    }
