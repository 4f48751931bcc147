"""Compares tiles of products with packed experts: `python -m benchmarks.gpu.expert_tiles [--results DIR]`.

A step of some rows runs through all layers of experts of a model's shape in a CUDA graph, each layer with weights and
routing of its own, so that no weights stay in the GPU's cache. Every choice of tiles is compiled in other processes,
checked against plain torch, and then timed. Figures are microseconds of a layer, and the bytes of its used experts a
second beside what probes of the memory reach. A choice that does not compile or computes something else is reported and
not timed.
"""

import ctypes
import multiprocessing
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from benchmarks.command import command_line, integers
from benchmarks.gpu.attention import seconds
from benchmarks.results import GrowingResult
from ktqueue.bench.environment import environment
from ktqueue.loading.synthetic.random_blocks import random_blocks
from ktqueue.operators import native
from ktqueue.operators.gpu.kernels import decoded_experts
from ktqueue.operators.gpu.kernels import expert_products as products
from ktqueue.operators.gpu.kernels.expert_pairs import ExpertPairs
from ktqueue.operators.gpu.kernels.expert_tiles import (
    INFINITE,
    TILES,
    CoreTile,
    DotTile,
    DotTiles,
    ExpertTiles,
    MatrixTile,
    MatrixTiles,
)
from ktqueue.operators.gpu.kernels.operation import dependent_launches
from ktqueue.operators.gpu.kernels.panel_layout import ExpertRecord
from ktqueue.operators.native import SILU
from ktqueue.operators.packed import ExpertWeights, PackedExperts


@dataclass(frozen=True, slots=True)
class Shape:
    """The routed experts of a model. slots: experts that a token chooses."""

    layers: int
    experts: int
    slots: int
    record: ExpertRecord


SHAPES = {
    "qwen3-30b-a3b": Shape(48, 128, 8, ExpertRecord("Q4_K", "Q4_K", "Q6_K", 2048, 768)),
    "deepseek-v2-lite": Shape(26, 64, 6, ExpertRecord("Q4_K", "Q4_K", "Q8_0", 2048, 1408)),
}
"""As in a Q4_K_M file."""
ROWS = (1, 4, 16, 64, 256, 2048)
DISTINCT = 8
"""Experts of different weights. All others are copies of them, each in its own memory."""
DEVIATION = 0.02
BOUND = 0.03
"""Largest relative error of a pair: its weights or its activations are rounded."""
DECODED_ROWS = (16, 32, 64)
"""Rows that a program decodes at once, where experts are decoded first."""
PROBE_BYTES = 4 << 30
NO_MATRICES = ((INFINITE, None),)


@dataclass(frozen=True, slots=True)
class Choice:
    """Tiles for steps of least to most rows. tiles None: experts are decoded first."""

    tiles: ExpertTiles | None
    least: int = 1
    most: int = 1 << 30


def _dots(
    pairs: int, gate_up: DotTile, down: DotTile, *, skips: bool = False, least: int = 1, most: int = 256
) -> Choice:
    tiles = DotTiles(pairs, gate_up, down, skips)
    own = tiles._replace(pairs=1, skips=False)
    return Choice(
        replace(TILES, few_pairs=INFINITE, early_pairs=None, matrices=NO_MATRICES, own=((INFINITE, own),), dots=tiles),
        least,
        most,
    )


def _matrices(gate_up: MatrixTile, down: MatrixTile, *, least: int = 16, most: int = 256) -> Choice:
    matrices = ((INFINITE, MatrixTiles(gate_up, down)),)
    return Choice(replace(TILES, own_pairs=0, matrices=matrices), least, most)


def _cores(tile: CoreTile, *, scans: bool = False, least: int = 4, most: int = 1 << 30) -> Choice:
    scanned = TILES.scanned_pairs if scans else 0
    return Choice(
        replace(TILES, few_pairs=0, matrices=NO_MATRICES, cores=((INFINITE, tile),), scanned_pairs=scanned), least, most
    )


CHOICES: dict[str, Choice] = {
    "as used": Choice(TILES),
    # Integer products. With one or four rows, each pair has its own programs.
    "dots 2, 32x32, 8x64": _dots(2, DotTile(32, 32), DotTile(8, 64)),
    "dots 2, 64x32, 32x32": _dots(2, DotTile(64, 32), DotTile(32, 32), most=16),
    "dots 2, 16x32, 8x32": _dots(2, DotTile(16, 32), DotTile(8, 32)),
    "dots 2, 16x64, 8x128": _dots(2, DotTile(16, 64), DotTile(8, 128)),
    "dots 2, 32x32, 32x16": _dots(2, DotTile(32, 32), DotTile(32, 16)),
    "dots 2 of some, 32x32, 8x64": _dots(2, DotTile(32, 32), DotTile(8, 64), skips=True, least=16),
    "dots 4, 8x32x3, 8x32": _dots(4, DotTile(8, 32, 3), DotTile(8, 32), least=16),
    "dots 4 of some, 8x32x3, 8x32": _dots(4, DotTile(8, 32, 3, 168), DotTile(8, 32), skips=True, least=16),
    "dots 4 of some, 32x32, 8x64": _dots(4, DotTile(32, 32), DotTile(8, 64), skips=True, least=16),
    "dots 4 of some, 8x32, 8x32": _dots(4, DotTile(8, 32), DotTile(8, 32), skips=True, least=16),
    "dots 8 of some, 8x32x3, 8x32": _dots(8, DotTile(8, 32, 3, 168), DotTile(8, 32), skips=True, least=16),
    "dots 8 of some, 8x32, 8x32": _dots(8, DotTile(8, 32, 0, 168), DotTile(8, 32), skips=True, least=16),
    "dots 8 of some, 8x64x3, 8x64x3": _dots(8, DotTile(8, 64, 3, 168), DotTile(8, 64, 3), skips=True, least=16),
    "dots 8 of some, 16x32x2, 8x32x2": _dots(8, DotTile(16, 32, 2, 168), DotTile(8, 32, 2), skips=True, least=16),
    # Matrices of int8 on tensor cores.
    "matrices 8, 8 and 4 warps, runs": _matrices(MatrixTile(8, 8), MatrixTile(8, 4), most=64),
    "matrices 8, 8 and 4 warps, without runs": _matrices(
        MatrixTile(8, 8, has_runs=False), MatrixTile(8, 4, has_runs=False), most=64
    ),
    "matrices 8, 4 warps, without runs": _matrices(
        MatrixTile(8, 4, has_runs=False), MatrixTile(8, 4, has_runs=False), most=64
    ),
    "matrices 8, 16 and 12 warps, runs": _matrices(MatrixTile(8, 16), MatrixTile(8, 12), most=64),
    "matrices 16, 6 warps, runs": _matrices(MatrixTile(16, 6), MatrixTile(16, 6), least=64),
    "matrices 16, 12 warps, runs": _matrices(MatrixTile(16, 12), MatrixTile(16, 12), least=64),
    "matrices 24, 12 and 13 warps, runs": _matrices(MatrixTile(24, 12), MatrixTile(24, 13), least=64, most=512),
    "matrices 32, 12 and 11 warps, runs": _matrices(MatrixTile(32, 12), MatrixTile(32, 11), least=64, most=512),
    # Tensor cores.
    "cores 16x64, scanned": _cores(CoreTile(16, 64, 3, 4, permuted=False), scans=True, least=4, most=64),
    "cores 16x64": _cores(CoreTile(16, 64, 3, 4, permuted=False), most=256),
    "cores 16x64, permuted": _cores(CoreTile(16, 64, 3, 4, permuted=True), most=256),
    "cores 16x64, permuted, 4 stages": _cores(CoreTile(16, 64, 4, 4, permuted=True), most=256),
    "cores 16x32, permuted, 2 warps": _cores(CoreTile(16, 32, 3, 2, permuted=True), most=256),
    "cores 16x128, permuted": _cores(CoreTile(16, 128, 3, 4, permuted=True), most=256),
    "cores 16x128, permuted, 8 warps": _cores(CoreTile(16, 128, 2, 8, permuted=True), most=256),
    "cores 32x64, permuted": _cores(CoreTile(32, 64, 3, 4, permuted=True), least=64, most=256),
    "cores 32x128, permuted": _cores(CoreTile(32, 128, 2, 4, permuted=True), least=64, most=256),
    "cores 64x128, permuted": _cores(CoreTile(64, 128, 2, 4, permuted=True), least=256),
    "cores 64x128, permuted, 3 stages": _cores(CoreTile(64, 128, 3, 4, permuted=True), least=256),
    "cores 128x128, permuted": _cores(CoreTile(128, 128, 2, 8, permuted=True), least=2048),
    "cores 128x64, permuted, 3 stages": _cores(CoreTile(128, 64, 3, 8, permuted=True), least=2048),
    "decoded": Choice(None, least=64),
}


@dataclass(frozen=True, slots=True)
class Layers:
    """Experts of some layers on a device. offsets: [layers, experts]; memory: for decoded experts."""

    pool: torch.Tensor
    offsets: torch.Tensor
    record: ExpertRecord
    memory: torch.Tensor

    @classmethod
    def make(cls, record: ExpertRecord, layers: int, experts: int, device: str) -> "Layers":
        """Pack DISTINCT random experts with the CPU's kernels, and copy them."""
        random = np.random.default_rng(0)

        def matrix(quant: str, rows: int, columns: int) -> PackedExperts:
            size = rows * native.row_bytes(quant, columns)
            sample = random_blocks(quant, 1, DEVIATION, random).nbytes
            data = [random_blocks(quant, -(-size // sample), DEVIATION, random).reshape(-1) for _ in range(DISTINCT)]
            return PackedExperts(quant, rows, columns, data)

        gate, up = (matrix(quant, record.intermediate, record.hidden) for quant in (record.gate, record.up))
        packed = native.ExpertLayer(ExpertWeights(gate, up, matrix(record.down, record.hidden, record.intermediate)))
        records = [b"".join(ctypes.string_at(*part) for part in packed.ranges(expert)) for expert in range(DISTINCT)]
        few = torch.frombuffer(bytearray(b"".join(records)), dtype=torch.uint8).to(device)
        total = layers * experts
        pool = torch.empty(total * record.bytes, dtype=torch.uint8, device=device)
        for first in range(0, total, DISTINCT):
            part = pool[first * record.bytes :][: len(few)]
            part.copy_(few[: len(part)])
        offsets = torch.arange(total, device=device).view(layers, experts) * record.bytes
        weights = decoded_experts.decoded_weights(record, experts)
        return cls(pool, offsets, record, torch.empty(weights, dtype=torch.bfloat16, device=device))


@dataclass(frozen=True, slots=True)
class Step:
    """The input of one layer: pairs, x [rows, hidden] bfloat16 and weights [rows, slots]."""

    pairs: ExpertPairs
    x: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def make(cls, layers: Layers, layer: int, rows: int, slots: int) -> "Step":
        """A random step of `rows` rows through a layer."""
        device, offsets = layers.pool.device, layers.offsets[layer]
        random = torch.Generator().manual_seed(1000 * layer + rows)
        ids = torch.rand(rows, len(offsets), generator=random).topk(slots).indices
        x = torch.randn(rows, layers.record.hidden, generator=random).bfloat16()
        weights = torch.rand(rows, slots, generator=random) + 0.5
        pairs = ExpertPairs(layers.pool, offsets, ids.to(device), layers.record)
        return cls(pairs, x.to(device), weights.to(device))

    def run(self, choice: Choice, memory: torch.Tensor) -> torch.Tensor:
        """All launches of the step: partials [rows, slots, hidden], or their sum [rows, 1, hidden] if decoded."""
        if choice.tiles is None:
            return decoded_experts.experts(self.pairs, self.pairs.offsets, self.x, self.weights, SILU, memory)
        return products.experts(self.pairs, self.pairs.offsets, self.x, self.weights, SILU, tiles=choice.tiles)

    def expected(self) -> torch.Tensor:
        """Partials in plain torch, neither activations nor weights rounded. Only experts of different weights are
        decoded."""
        size = self.pairs.record.bytes
        ids = self.pairs.offsets[self.pairs.ids] // size % DISTINCT
        twin = self.pairs._replace(ids=ids, offsets=torch.arange(DISTINCT, device=ids.device) * size)
        mid = torch.zeros(*ids.shape, self.pairs.record.intermediate, device=ids.device)
        products.gate_up_twin(twin, self.x, SILU, mid)
        partials = torch.empty(*ids.shape, self.pairs.record.hidden, device=ids.device)
        products.down_twin(twin, mid.view(-1, mid.shape[-1]), self.weights, partials)
        return partials


def largest_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative error of a pair, or of a token if pairs are added up."""
    if found.shape[1] == 1:
        expected = expected.sum(1, keepdim=True)
    errors = (found.float() - expected).norm(dim=2) / expected.norm(dim=2).clamp(min=1e-30)
    return float(errors.nan_to_num(torch.inf).max())


def applicable(rows: Iterable[int]) -> list[tuple[str, int]]:
    """Each choice with each number of rows that it is meant for."""
    return [
        (name, number)
        for (name, choice), number in product(CHOICES.items(), rows)
        if choice.least <= number <= choice.most
    ]


def compile_choice(shape: Shape, name: str, rows: tuple[int, ...]) -> str:
    """Compile the kernels of a choice in this process, so that others find them in Triton's cache. Returns what went
    wrong, or nothing."""
    try:
        layers = Layers.make(shape.record, 1, shape.experts, "cuda")
        for number in rows:
            Step.make(layers, 0, number, shape.slots).run(CHOICES[name], layers.memory)
        torch.cuda.synchronize()
    except Exception as error:  # whatever a compiler or a driver refuses
        return f"{type(error).__name__}: {str(error)[:300]}"
    return ""


def compile_all(shape: Shape, points: Iterable[tuple[str, int]], processes: int) -> dict[str, str]:
    """Compile in so many processes. What went wrong, by choice."""
    by_name: dict[str, tuple[int, ...]] = {}
    for name, rows in points:
        by_name[name] = (*by_name.get(name, ()), rows)
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = dict(zip(by_name, pool.map(partial(compile_choice, shape), by_name, by_name.values()), strict=True))
    return {name: error for name, error in found.items() if error}


def layer_seconds(layers: Layers, steps: list[Step], choice: Choice) -> float:
    """Mean time of a layer in a graph of all."""
    steps[0].run(choice, layers.memory)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step.run(choice, layers.memory)
    return seconds(graph.replay, 1) / len(steps)


def decode_figures(layers: Layers, slots: int) -> list[dict[str, Any]]:
    """Decoding all experts of a layer, without their products, by the rows that a program decodes. Each layer is read
    from memory. GB/s count what is read and written."""
    record, pairs, experts = layers.record, Step.make(layers, 0, ROWS[-1], slots).pairs, layers.offsets.shape[1]
    rows, found = decoded_experts.sort_rows(pairs), []
    written = 3 * experts * record.hidden * record.intermediate * layers.memory.itemsize
    for rows_at_once in DECODED_ROWS:

        def run(rows_at_once: int = rows_at_once) -> None:
            for offsets in layers.offsets:
                for quants in ((record.gate, record.up), (record.down,)):
                    decoded_experts.decode(
                        pairs._replace(offsets=offsets), rows, layers.memory, quants, rows_at_once=rows_at_once
                    )

        took = seconds(run, 1) / len(layers.offsets)
        gigabytes = (experts * record.bytes + written) / 1e9
        found.append({"rows_at_once": rows_at_once, "layer_us": 1e6 * took, "gb_s": gigabytes / took})
    return found


def probe(pool: torch.Tensor) -> dict[str, float]:
    """GB/s of a sum over memory, and of a copy, which reads and writes."""
    source = pool[: min(PROBE_BYTES, len(pool) // 16 * 8)].view(torch.float64)
    target = torch.empty_like(source)
    summed = seconds(partial(torch.sum, source.view(torch.int64)), 1)
    copied = seconds(partial(target.copy_, source), 1)
    return {"read_gb_s": source.nbytes / summed / 1e9, "copy_gb_s": 2 * source.nbytes / copied / 1e9}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rows", type=integers, default=",".join(map(str, ROWS)))
    parser.add_argument("--shape", choices=tuple(SHAPES), default="qwen3-30b-a3b")
    parser.add_argument("--only", default="", help="choices whose names contain this")
    parser.add_argument("--processes", type=int, default=12, help="that compile")
    parser.add_argument("--early", action="store_true", help="launch kernels before the one before has ended")
    arguments = parser.parse_args()
    shape, begun = SHAPES[arguments.shape], time.perf_counter()
    points = [(name, rows) for name, rows in applicable(arguments.rows) if arguments.only in name]
    failed = compile_all(shape, points, arguments.processes)
    compiled = time.perf_counter() - begun
    sys.stderr.write(f"compiled in {compiled:.0f} s; failed: {failed}\n")
    layers = Layers.make(shape.record, shape.layers, shape.experts, "cuda")
    result = GrowingResult(
        arguments.results / f"expert-tiles-{arguments.shape}.json",
        environment=environment(),
        shape=arguments.shape,
        early=arguments.early,
        layers=shape.layers,
        experts=shape.experts,
        compile_seconds=compiled,
        failed=failed,
        probe=probe(layers.pool),
    )
    for figure in decode_figures(layers, shape.slots):
        result.add(figure, "decode")
    for rows in arguments.rows:
        steps = [Step.make(layers, layer, rows, shape.slots) for layer in range(shape.layers)]
        expected = steps[0].expected()
        used = sum(len(torch.bincount(step.pairs.ids.flatten()).nonzero()) for step in steps) / shape.layers
        for name in (name for name, number in points if number == rows and name not in failed):
            choice = CHOICES[name]
            figure = {"rows": rows, "choice": name, "experts": used}
            try:
                with dependent_launches(arguments.early):
                    figure["error"] = largest_error(steps[0].run(choice, layers.memory), expected)
                    figure["is_right"] = figure["error"] <= BOUND
                    took = layer_seconds(layers, steps, choice) if figure["is_right"] else 0.0
                if took:
                    figure["layer_us"] = 1e6 * took
                    figure["gb_s"] = used * shape.record.bytes / took / 1e9
            except RuntimeError as error:  # also of a capture, and of memory
                figure["failed"] = str(error)[:200]
            result.values["seconds"] = time.perf_counter() - begun
            result.add(figure)
    sys.stderr.write(
        "".join(f"{rows} rows: {best(result.values.get('figures', []), rows)}\n" for rows in arguments.rows)
    )


def best(figures: list[dict[str, Any]], rows: int) -> str:
    """The three fastest choices for so many rows, and the used one."""
    timed = sorted((f for f in figures if f["rows"] == rows and "layer_us" in f), key=lambda f: float(f["layer_us"]))
    shown = timed[:3] + [figure for figure in timed[3:] if figure["choice"] == "as used"]
    return "; ".join(f"{f['choice']} {f['layer_us']:.1f} us, {f['gb_s']:.0f} GB/s" for f in shown)


if __name__ == "__main__":
    main()
