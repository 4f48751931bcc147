"""What a hand-off to the CPU's experts and back costs inside a CUDA graph: `python -m benchmarks.handoff [OUT.json]`.

Microseconds a layer of a graph of 48, for each method and transfer, in the shape of Qwen3-30B-A3B: without an expert to
run (all ids -1), and with experts, beside the layer alone. `spin`: microseconds for which idle kernel threads spin.
Needs a CUDA device.
"""

import json
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ktqueue.bench.random_layers import random_layer
from ktqueue.bench.roofline import LayerShape
from ktqueue.operators import native
from ktqueue.operators.gpu.handoff import Handoff
from ktqueue.operators.gpu.settings import HandoffMethod
from ktqueue.operators.gpu.transfer import TransferMethod

SHAPE = LayerShape(hidden=2048, intermediate=768, experts=128, experts_per_token=8)
LAYERS, COPIES, REPLAYS = 48, 8, 20
METHODS: tuple[HandoffMethod, ...] = ("flags", "host_functions")
TRANSFERS: tuple[TransferMethod, ...] = ("copy", "mapped")


def graph_microseconds(
    layers: list[native.ExpertLayer], rows: int, method: HandoffMethod, transfer: TransferMethod, *, idle: bool
) -> float:
    """A layer's share of a replay; `idle`: no token has an expert on the CPU."""
    handoff = Handoff(SHAPE.hidden, SHAPE.experts_per_token, rows, "cuda", method=method, transfer=transfer)
    numbers = [handoff.add_layer(layer) for layer in layers]
    x = torch.randn(rows, SHAPE.hidden, device="cuda", dtype=torch.bfloat16)
    ids = torch.rand(rows, SHAPE.experts, device="cuda").topk(SHAPE.experts_per_token).indices
    weights = torch.rand(rows, SHAPE.experts_per_token, device="cuda")
    if idle:
        ids.fill_(-1)

    def step() -> None:
        for at in range(LAYERS):
            number = numbers[at % len(numbers)]
            handoff.submit(number, x, ids, weights)
            handoff.wait(number, rows)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    handoff.check()
    handoff.close()
    return 1e6 * seconds / REPLAYS / LAYERS


def layer_microseconds(layers: list[native.ExpertLayer], rows: int) -> float:
    """The layers alone, called from here."""
    x, weights = torch.randn(rows, SHAPE.hidden).numpy(), torch.rand(rows, SHAPE.experts_per_token).numpy()
    ids = torch.rand(rows, SHAPE.experts).topk(SHAPE.experts_per_token).indices.numpy()
    out = torch.empty(rows, SHAPE.hidden).numpy()
    for layer in layers:
        layer.forward(x, ids, weights, out)
    begin = time.perf_counter()
    for at in range(REPLAYS * len(layers)):
        layers[at % len(layers)].forward(x, ids, weights, out)
    return 1e6 * (time.perf_counter() - begin) / REPLAYS / len(layers)


def run(spin: int) -> list[dict[str, Any]]:
    """One row a number of tokens, method and transfer."""
    native.set_threads(spin_microseconds=spin)
    layers = [random_layer("Q4_K", SHAPE, "") for _ in range(COPIES)]
    results = []
    for rows, method, transfer in product((1, 4, 16, 64, 512), METHODS, TRANSFERS):
        results.append(
            {
                "rows": rows,
                "method": method,
                "transfer": transfer,
                "spin": spin,
                "idle": graph_microseconds(layers, rows, method, transfer, idle=True),
                "experts": graph_microseconds(layers, rows, method, transfer, idle=False),
                "layer_alone": layer_microseconds(layers, rows),
            }
        )
        sys.stdout.write(json.dumps(results[-1]) + "\n")
        sys.stdout.flush()
    return results


if __name__ == "__main__":
    table = [one for spin in (native.SPIN_MICROSECONDS, 2000) for one in run(spin)]
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(table, indent=1))
