"""The tables of `ktqueue bench`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ktqueue.bench.experts import KernelFigure
from ktqueue.bench.machine import MachineLimits
from ktqueue.bench.roofline import Bound
from ktqueue.cli.terminal.console import results, table
from ktqueue.core.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

GIGA = 1e9


def show_machine(machine: MachineLimits) -> None:
    """Show the bandwidth of each level of memory and the arithmetic of each instruction set."""
    console = results()
    console.print(f"[bold]{machine.cpu}[/], {machine.threads} of {machine.cpus} CPUs\n")
    single, together = "1 thread", f"{machine.threads} threads"
    heads: tuple[str, ...] = ("GB/s from", "range", single, together)
    rows = [(b.level, format_bytes(b.size), _giga(b.one_thread), _giga(b.all_threads)) for b in machine.bandwidths]
    console.print(table(heads, rows, right=heads[1:]))
    console.print()
    heads = ("GFLOP/s in", "isa", "with", single, together)
    peaks = [(p.arithmetic, p.isa, p.instruction, _giga(p.one_thread), _giga(p.all_threads)) for p in machine.peaks]
    console.print(table(heads, peaks, right=heads[3:]))
    console.print()


def show_points(points: Sequence[KernelFigure], console: "Console | None" = None) -> None:
    """Show the figures of the kernels beside the limits, on standard output or another console."""
    if not points:
        return
    heads = ("format", "isa", "rows", "a layer", "GB/s", "of DRAM", "GFLOP/s", "of peak", "bound by")
    listing = table(heads, right=[head for head in heads if head not in ("format", "isa", "bound by")])
    listing.padding = (0, 1, 0, 0)  # narrow, so that it fits 80 columns
    before = points[0]
    for point in points:
        if (point.quant, point.isa) != (before.quant, before.isa):
            listing.add_section()
        before = point
        listing.add_row(
            point.quant,
            point.isa,
            f"{point.rows} tok" if point.routed else str(point.rows),
            _time(point.seconds),
            _giga(point.bytes_per_second),
            _share(point, Bound.MEMORY),
            _giga(point.operations_per_second),
            _share(point, Bound.ARITHMETIC),
            (point.arithmetic if point.bound is Bound.ARITHMETIC else "DRAM") + (" ?" if point.disturbed else ""),
        )
    console = console or results()
    console.print(listing)
    console.print("\nrows: of each expert that is used; tok: tokens with random routing", soft_wrap=True)
    console.print("GB/s: of weights as stored in a file; DRAM and peak are measured beside each row", soft_wrap=True)
    if any(point.disturbed for point in points):
        console.print("?: the limits changed meanwhile, because something else was running", soft_wrap=True)


def _giga(value: float) -> str:
    return f"{value / GIGA:,.1f}"


def _time(seconds: float) -> str:
    """Write three digits and a unit."""
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        if seconds * scale < 999.5:
            return f"{seconds * scale:#.3g} {unit}".replace(". ", " ")
    return f"{seconds:,.2f} s"


def _share(point: KernelFigure, bound: Bound) -> str:
    """Write the share of a limit, in bold if that limit binds. Then it is the share of what is possible."""
    shares = {Bound.MEMORY: point.bandwidth_share, Bound.ARITHMETIC: point.peak_share}
    return f"[bold]{shares[bound]:.0%}[/]" if bound is point.bound else f"[dim]{shares[bound]:.0%}[/]"
