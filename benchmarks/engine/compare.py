"""Decode and prefill of our engine, and of llama.cpp beside it on the same file, point by point in turns."""

from contextlib import ExitStack
from functools import partial
from random import Random
from typing import Any

from benchmarks import machine, peer
from benchmarks.engine.footprint import of_file
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
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "seed": 11}


PATHS = {"llama.cpp repack": True, "llama.cpp no-repack": False}
PROMPT_TOKENS = 32


def run(
    *,
    model: str,
    rows: list[int],
    prefill: int,
    tokens: int,
    rounds: int,
    threads: int,
    llama_python: str | None,
    sampled: bool,
    without_ours: bool,
) -> dict[str, Any]:
    """All points, `rounds` times in turns; of each peer and point every figure."""
    path = resolve(model)
    tokenizer = load_tokenizer(model)
    ids = [tokenizer.encode(text)[: PROMPT_TOKENS - 1] for text in PROMPTS]
    # Rows differ by their last token, so that they do not all say the same.
    points: list[dict[str, Any]] = [
        {"rows": count, "prompts": [[*ids[i % len(ids)], 300 + i] for i in range(count)], "tokens": tokens}
        for count in rows
    ]
    if prefill:
        spread = Random(5)
        points.append({"rows": 0, "prefill": [spread.randrange(tokenizer.size) for _ in range(prefill)]})
    footprint = of_file(path)
    with ExitStack() as stack:
        peers: dict[str, peer.Peer] = {}
        versions = {}
        if not without_ours:
            peers["ktqueue"] = stack.enter_context(peer.ours(str(path), threads))
        if llama_python:
            for name, repack in PATHS.items():
                peers[name] = stack.enter_context(
                    peer.llama(llama_python, str(path), threads, max(rows), repack=repack)
                )
                versions.update(peers[name].hear())
        for one in peers.values():  # wake threads and caches
            for point in (points[0], points[-1]):
                one.ask({**point, "tokens": 16})
        watch = machine.Watch([one.process_id for one in peers.values()])
        taken: list[dict[str, Any]] = []
        for turn in range(rounds):
            for point in points:
                for name, one in peers.items():
                    figure = watch.take(partial(one.ask, point))
                    taken.append({"peer": name, "rows": point["rows"], "round": turn, **figure})
                if sampled and "ktqueue" in peers and point["rows"]:
                    figure = watch.take(partial(peers["ktqueue"].ask, {**point, "sampling": SAMPLED}))
                    taken.append({"peer": "ktqueue sampled", "rows": point["rows"], "round": turn, **figure})
        distinct = {count: footprint.expected_experts(count) for count in rows}
        if "ktqueue" in peers:
            counted = {point["rows"]: {"experts": {**point, "tokens": 24}} for point in points if point["rows"]}
            distinct = {count: peers["ktqueue"].ask(question) for count, question in counted.items()}
    return {
        "what": "the whole step with all rows running, greedy unless said; a prompt alone where rows are 0",
        "model": path.name,
        "prompt_tokens": PROMPT_TOKENS,
        "tokens": tokens,
        "prefill": prefill,
        "threads": threads,
        "rounds": rounds,
        "sampling": SAMPLED,
        "versions": versions,
        "figures": taken,
        "experts_of_layer": footprint.experts,
        "distinct_experts": {str(count): value for count, value in distinct.items()},
        "step_bytes": {str(count): footprint.step_bytes(value) for count, value in distinct.items()},
        "weights_of_token": footprint.weights,
    }
