"""Speed of the expert kernels for each format, instruction set and number of rows.

Each figure runs several layers in turn, so that weights are read from memory. Between the calls, probes measure what
the machine can do at that time. The best probe of each kind is the limit that the figure is compared with.
"""

import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

from ktqueue import __version__
from ktqueue.bench.machine import MIB, MachineLimits, Probes
from ktqueue.bench.random_layers import SEED, Pattern, expert_bytes, formats, random_layer, same_experts, uniform
from ktqueue.bench.roofline import Bound, LayerShape, Limits, layer_work
from ktqueue.operators import native
from ktqueue.workers.startup.memory_bandwidth import last_cache

LEAST_WEIGHTS = 256 * MIB
CACHES = 4
BATCH_SECONDS = 0.02  # of calls between two readings of the clock
PARTS = 3  # into which the time of a figure is divided, with probes between them
DISTURBED = 0.8  # lowest share of a figure's worst probe in its best; below it something else was running
REPORT_FORMAT = 1  # of the JSON; raised when a name changes its meaning
FLOATS = ("F32", "F16", "BF16", "FP8")


@dataclass(frozen=True, slots=True)
class Load:
    """Number of tokens: `rows` for each used expert, or, if `routed`, `rows` tokens with random routing."""

    rows: int
    routed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What to measure. `seconds`: time of the calls of each figure, without probes and packing.

    `memory`: least bytes of weights that each figure reads in turn. By default they are LEAST_WEIGHTS, but at least
    CACHES times the last cache. `batch_invariant`: see native.set_batch_invariant.
    """

    shape: LayerShape
    quants: tuple[str, ...]
    isas: tuple[str, ...]
    loads: tuple[Load, ...]
    seconds: float
    memory: int | None = None
    batch_invariant: bool = False

    def tile_rows(self, quant: str, isa: str) -> int:
        """Return from how many rows of an expert on AMX tiles run; 0: never."""
        rows = native.tile_rows(quant, isa)
        return min(rows, int(quant in FLOATS)) if self.batch_invariant else rows

    def __len__(self) -> int:
        return len(self.quants) * len(self.isas) * len(self.loads)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFigure:
    """Speed of a layer call in seconds, bytes and operations (a multiply-add is two), and the machine's limits then."""

    quant: str
    isa: str
    rows: int
    routed: bool
    tokens: int
    experts_touched: int
    seconds: float  # of one layer call
    bytes: int  # of the weights that are used, as stored in a file
    operations: int
    bandwidth: float  # bytes per second that memory delivered then
    peak: float  # operations per second of `arithmetic` with `peak_isa` then
    peak_isa: str
    arithmetic: str
    bound: Bound  # the limit that binds
    limit_seconds: float  # the least time that the call can take
    disturbed: bool  # its probes differ: measure again

    @property
    def bytes_per_second(self) -> float:
        """Bytes of weights read per second."""
        return self.bytes / self.seconds

    @property
    def operations_per_second(self) -> float:
        """Operations per second; a multiply-add is two."""
        return self.operations / self.seconds

    @property
    def bandwidth_share(self) -> float:
        """Share of the measured bandwidth."""
        return self.bytes_per_second / self.bandwidth

    @property
    def peak_share(self) -> float:
        """Share of the measured arithmetic."""
        return self.operations_per_second / self.peak

    @property
    def share(self) -> float:
        """Share of the limit that binds, the larger of the two shares. 1 is the machine's best."""
        return self.limit_seconds / self.seconds


def arithmetic_of(
    quant: str,
    isa: str,
    rows: float,
    *,
    tile_rows: Callable[[str, str], int] = native.tile_rows,
    peaks: Callable[[], Sequence[tuple[str, str, str]]] = native.peaks,
) -> tuple[str, str]:
    """Return (isa, arithmetic) of the peak with which kernels of a format (of gate and up) and `isa` are compared.

    With enough `rows` per expert, on average, AMX tiles run, with bf16. Otherwise block formats use int8 (on AMX that
    of AVX-512, whose kernels run there) and floats use fp32. If `isa` has no such arithmetic, the next lower counts.
    """
    quant, _ = formats(quant)
    if 0 < tile_rows(quant, isa) <= rows:
        return isa, "bf16"
    arithmetic = "fp32" if quant in FLOATS else "int8"
    offered = [(name, kind) for name, kind, _ in peaks()]
    order = list(dict.fromkeys(name for name, _ in offered))
    below = [name for name in order[: order.index(isa) + 1] if name != "amx"]
    return next(name for name in reversed(below) if (name, arithmetic) in offered), arithmetic


def sweep_memory(sweep: Sweep, caches: dict[str, int]) -> int:
    """Bytes of the largest set of layers of a sweep, while its last layer is packed.

    caches: the result of `cache_sizes()`. Raises ValueError if a format does not fit the shape.
    """
    most = 0
    for quant in sweep.quants:
        shape, layers = _layer_set(sweep, quant, caches)
        most = max(most, (layers + 1) * shape.experts * expert_bytes(quant, shape))
    return most


def run_sweep(
    sweep: Sweep, probes: Probes, progress: Callable[[int, str], None] = lambda _done, _note: None
) -> Iterator[KernelFigure]:
    """Measure all figures, format by format. Calls `progress(figures done, what is next)`. Raises ValueError.

    Sets batch invariance for all kernels of this process.
    """
    done = 0
    native.set_batch_invariant(sweep.batch_invariant)
    for quant in sweep.quants:
        shape, count = _layer_set(sweep, quant, probes.caches)
        for isa in sweep.isas:
            progress(done, f"{quant} {isa}: packing")
            layers = [random_layer(quant, shape, isa) for _ in range(count)]
            for load in sweep.loads:
                progress(done, f"{quant} {isa}: {load.rows} {'tokens' if load.routed else 'rows an expert'}")
                yield _measure(sweep, quant, layers, shape, load, probes)
                done += 1
            del layers
    progress(done, "")


def _layer_set(sweep: Sweep, quant: str, caches: dict[str, int]) -> tuple[LayerShape, int]:
    """Return (shape, layers) with enough weights. Without random routing there are only as many experts as needed."""
    shape, size = sweep.shape, expert_bytes(quant, sweep.shape)
    least = sweep.memory or max(LEAST_WEIGHTS, CACHES * last_cache(caches))
    if not any(load.routed for load in sweep.loads):
        group = shape.experts_per_token
        groups = min(-(-least // (size * group)), shape.experts // group)
        shape = replace(shape, experts=max(1, groups) * group)
    return shape, max(1, -(-least // (size * shape.experts)))


def _measure(
    sweep: Sweep, quant: str, layers: list[native.ExpertLayer], shape: LayerShape, load: Load, probes: Probes
) -> KernelFigure:
    isa, random = layers[0].isa, np.random.default_rng(SEED)
    pattern = (
        uniform(load.rows, shape.experts, shape.experts_per_token, random)
        if load.routed
        else same_experts(load.rows, shape.experts_per_token)
    )
    peak_isa, arithmetic = arithmetic_of(quant, isa, pattern.pairs / pattern.touched, tile_rows=sweep.tile_rows)
    bandwidths: list[float] = []
    peaks: list[float] = []

    def probe() -> None:
        bandwidths.append(probes.bandwidth())
        peaks.append(probes.peak(peak_isa, arithmetic))

    seconds = best_seconds(_calls(layers, shape, pattern, random), sweep.seconds, probe)
    limits = Limits(max(bandwidths), max(peaks))
    work = layer_work(shape, expert_bytes(quant, shape), touched=pattern.touched, pairs=pattern.pairs)
    return KernelFigure(
        quant=quant,
        isa=isa,
        rows=load.rows,
        routed=load.routed,
        tokens=len(pattern.choices),
        experts_touched=pattern.touched,
        seconds=seconds,
        bytes=work.bytes,
        operations=work.operations,
        bandwidth=limits.bandwidth,
        peak=limits.peak,
        peak_isa=peak_isa,
        arithmetic=arithmetic,
        bound=limits.bound(work),
        limit_seconds=limits.seconds(work),
        disturbed=any(min(pair) < DISTURBED * max(pair) for pair in (bandwidths, peaks)),
    )


def _calls(
    layers: list[native.ExpertLayer], shape: LayerShape, pattern: Pattern, random: np.random.Generator
) -> list[Callable[[], None]]:
    """Calls of equal work to run one after another, each on weights that the calls before did not use."""
    tokens = len(pattern.choices)
    x = random.standard_normal((tokens, shape.hidden), np.float32)
    weights = np.full(pattern.choices.shape, 1 / shape.experts_per_token, np.float32)
    out = np.empty_like(x)
    return [
        partial(layer.forward, x, choices, weights, out) for choices in pattern.calls(shape.experts) for layer in layers
    ]


def best_seconds(calls: Iterable[Callable[[], None]], seconds: float, probe: Callable[[], None]) -> float:
    """Return the seconds per call of the fastest batch, from about `seconds` of calls after one call to warm up.

    `probe` runs before and after, and also in between if batches are short enough. Its time is not counted.
    """
    turn, clock = cycle(calls), time.perf_counter
    began = clock()
    next(turn)()
    single = clock() - began
    batch = max(1, round(BATCH_SECONDS / single))
    best, spent = float("inf"), 0.0
    probe()
    for part in range(1, PARTS + 1):
        while spent < seconds * part / PARTS or best == float("inf"):
            batch_began = clock()
            for _ in range(batch):
                next(turn)()
            elapsed = clock() - batch_began
            best, spent = min(best, elapsed / batch), spent + elapsed
        probe()
        if spent >= seconds:
            break
    return best


def sweep_report(
    machine: MachineLimits, sweep: Sweep, points: Sequence[KernelFigure], *, load_before: float
) -> dict[str, Any]:
    """Return the report of a sweep as JSON values, with versions, time and the load of the machine.

    Figures are in bytes, seconds, operations and their quotients.

    load_before: `os.getloadavg()[0]` before the sweep.
    """
    return {
        "format": REPORT_FORMAT,
        "ktqueue": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "taken": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "load_before": round(load_before, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "machine": asdict(machine),
        "shape": asdict(sweep.shape),
        "seconds_per_point": sweep.seconds,
        "batch_invariant": sweep.batch_invariant,
        "points": [
            {
                **asdict(point),
                "bytes_per_second": point.bytes_per_second,
                "operations_per_second": point.operations_per_second,
                "bandwidth_share": point.bandwidth_share,
                "peak_share": point.peak_share,
                "share": point.share,
            }
            for point in points
        ],
    }
