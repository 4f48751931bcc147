"""What a hand-off to the CPU's experts and back costs inside a CUDA graph: `python -m benchmarks.handoff [OUT.json]`.

Microseconds a layer of a graph of 48, for each method, in the shape of Qwen3-30B-A3B: a norm that writes the rows where
the CPU reads them, a router that writes their experts there, the task, and the next norm, which reads its result.
`idle`: without an expert to run (all ids -1); `experts`: with experts, beside `layer_alone`; `kernels`: norm and router
on the GPU's own memory, without a hand-off: the task's way there and back costs what `idle` has more. `spin`:
microseconds for which idle kernel threads spin. Needs a CUDA device.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ktqueue.bench.random_layers import random_layer
from ktqueue.bench.roofline import LayerShape
from ktqueue.operators import native
from ktqueue.operators.gpu.handoff.handoff import Handoff, HandoffBuffers
from ktqueue.operators.gpu.kernels.fused import add_rms_norm, route
from ktqueue.operators.gpu.settings import HandoffMethod

SHAPE = LayerShape(hidden=2048, intermediate=768, experts=128, experts_per_token=8)
LAYERS, COPIES, REPLAYS = 48, 8, 20
METHODS: tuple[HandoffMethod, ...] = ("flags", "host_functions")


class Step:
    """LAYERS layers on `rows` rows. `handoff`: to layers with the given numbers; None: what goes to the CPU stays on
    the device and nothing is run. `idle`: the GPU has all experts, so the CPU gets ids of -1."""

    def __init__(self, rows: int, device: str, handoff: Handoff | None, numbers: list[int], *, idle: bool) -> None:
        self._handoff = handoff
        self._numbers = numbers
        self._start = torch.randn(rows, SHAPE.hidden, device=device, dtype=torch.bfloat16)
        self._residual = torch.empty_like(self._start)
        self._norm = torch.ones(SHAPE.hidden, device=device, dtype=torch.bfloat16)
        self._logits = torch.randn(rows, SHAPE.experts, device=device)
        self._on_gpu = torch.full((SHAPE.experts,), 0 if idle else -1, device=device)
        pairs = rows, SHAPE.experts_per_token
        self._on_device = HandoffBuffers(
            torch.zeros(rows, SHAPE.hidden, device=device),
            torch.zeros(pairs, dtype=torch.int64, device=device),
            torch.zeros(pairs, device=device),
            torch.zeros(rows, SHAPE.hidden, device=device),
            torch.zeros(pairs, dtype=torch.int64, device=device),
        )

    def __call__(self) -> torch.Tensor:
        """The last norm, [rows, hidden]."""
        residual, added, rows = self._residual.copy_(self._start), None, len(self._start)
        for at in range(LAYERS):
            buffers = self._handoff.buffers(rows) if self._handoff else self._on_device
            add_rms_norm(residual, self._norm, 1e-6, added=added, copy=buffers.x)
            copies = buffers.cpu_ids, buffers.weights
            route(self._logits, SHAPE.experts_per_token, renormalise=True, on_gpu=self._on_gpu, copies=copies)
            if self._handoff:
                number = self._numbers[at % len(self._numbers)]
                self._handoff.request(number, rows)
                self._handoff.settle(number, rows)
            added = buffers.result
        return add_rms_norm(residual, self._norm, 1e-6, added=added)


def graph_microseconds(step: Callable[[], Any]) -> float:
    """A layer's share of a replay of `step`."""
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
    return 1e6 * (time.perf_counter() - begin) / REPLAYS / LAYERS


def handoff_microseconds(layers: list[native.ExpertLayer], rows: int, method: HandoffMethod, *, idle: bool) -> float:
    """A layer's share with a hand-off; `idle`: no token has an expert on the CPU."""
    handoff = Handoff(SHAPE.hidden, SHAPE.experts_per_token, rows, "cuda", method=method)
    numbers = [handoff.add_layer(layer) for layer in layers]
    microseconds = graph_microseconds(Step(rows, "cuda", handoff, numbers, idle=idle))
    handoff.check()
    handoff.close()
    return microseconds


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
    """One row a number of tokens and method."""
    native.set_threads(spin_microseconds=spin)
    layers = [random_layer("Q4_K", SHAPE, "") for _ in range(COPIES)]
    results = []
    for rows in (1, 4, 16, 64, 512):
        kernels = graph_microseconds(Step(rows, "cuda", None, [], idle=True))
        for method in METHODS:
            results.append(
                {
                    "rows": rows,
                    "method": method,
                    "spin": spin,
                    "kernels": kernels,
                    "idle": handoff_microseconds(layers, rows, method, idle=True),
                    "experts": handoff_microseconds(layers, rows, method, idle=False),
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
