"""Decode throughput of our engine, and of llama.cpp beside it on the same file, point by point in turns."""

from contextlib import ExitStack
from typing import Any

from benchmarks import machine, peer
from ktqueue.loading.checkpoint import resolve

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


def run(
    *, model: str, rows: list[int], tokens: int, rounds: int, threads: int, llama_python: str | None
) -> dict[str, Any]:
    """All points, `rounds` times in turns; of each peer and point every figure, best last."""
    path = str(resolve(model))
    with ExitStack() as stack:
        engine = stack.enter_context(peer.ours(path, threads))
        peers = {"ktqueue": engine}
        versions = {}
        if llama_python:
            for name, repack in (("llama.cpp repack", True), ("llama.cpp no-repack", False)):
                peers[name] = stack.enter_context(peer.llama(llama_python, path, threads, max(rows), repack=repack))
                versions.update(peers[name].hear())
        encoded = engine.ask({"encode": list(PROMPTS)})
        points = []
        for count in rows:
            # Rows differ by their last token, so that they do not all say the same.
            prompts = [[*encoded[i % len(encoded)], 300 + i] for i in range(count)]
            points.append({"rows": count, "prompts": prompts, "tokens": tokens})
        for one in peers.values():  # wake threads and caches
            one.ask({**points[0], "tokens": 16})
        taken: list[dict[str, Any]] = []
        for turn in range(rounds):
            for point in points:
                for name, one in peers.items():
                    taken.append({"peer": name, "rows": point["rows"], "round": turn, **one.ask(point)})
                sampled = engine.ask({**point, "sampling": SAMPLED})
                taken.append({"peer": "ktqueue sampled", "rows": point["rows"], "round": turn, **sampled})
                taken[-1]["bandwidth_gb_s"] = machine.bandwidth()
                taken[-1]["load_average"] = machine.load_average()
        experts = {str(point["rows"]): engine.ask({"experts": {**point, "tokens": 48}}) for point in points}
    return {
        "what": "decode with all rows running, greedy unless said",
        "model": path.rpartition("/")[2],
        "prompt_tokens": sorted(len(one) + 1 for one in encoded),
        "tokens": tokens,
        "threads": threads,
        "rounds": rounds,
        "sampling": SAMPLED,
        "versions": versions,
        "figures": taken,
        "experts": experts,
    }
