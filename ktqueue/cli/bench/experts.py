"""`ktqueue bench experts`: the speed of the expert kernels, beside the limits of this machine."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ktqueue.cli.bench.arguments import STANDARD_OUTPUT, numbers, size, write_report
from ktqueue.cli.terminal.failures import UsageFault, check_output

if TYPE_CHECKING:
    from ktqueue.bench.experts import KernelFigure, Sweep

QUICK_FORMATS = "Q4_K,Q6_K,Q8_0,MXFP4,BF16"
QUICK_ROWS = "1,4,16,64,512"
FULL_ROWS = "1,2,3,4,7,8,16,33,64,128,512"
MAX_ROWS = 65536
PROBE_SHARE = 4  # the probe reads this many times the memory of the weights
_WHAT, _SHAPE = "What to measure", "Shape of the layer (default: Qwen3-30B-A3B's)"


def experts(
    formats: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Separated by commas, or all; Q4_K/Q6_K: gate and up in Q4_K, down in Q6_K.",
            show_default=QUICK_FORMATS,
            rich_help_panel=_WHAT,
        ),
    ] = None,
    isa: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="Separated by commas, or all.", show_default="the best", rich_help_panel=_WHAT
        ),
    ] = None,
    per_expert: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERS",
            help="Rows of each expert that is used.",
            show_default=QUICK_ROWS + ", unless --tokens",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="NUMBERS", help="Tokens with random routing.", rich_help_panel=_WHAT)
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="All formats, instruction sets and rows.", rich_help_panel=_WHAT)
    ] = False,
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant",
            help="Give a row the same bits in every batch, as a worker on a CPU does. It matters on AMX.",
            rich_help_panel=_WHAT,
        ),
    ] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, metavar="N", show_default="the cores", help="CPU threads.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.0, max=3600.0, metavar="S", help="Time to measure each point.")] = 0.3,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Weights that each point reads in turn. Less than the caches measures the caches.",
            show_default="256MiB, or four times the caches",
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write JSON to a file; - is standard output, without tables."),
    ] = None,
    num_experts: Annotated[
        int, typer.Option(min=1, max=65536, metavar="N", help="Experts of the layer.", rich_help_panel=_SHAPE)
    ] = 128,
    experts_per_token: Annotated[
        int, typer.Option(min=1, metavar="N", help="Experts that a token uses.", rich_help_panel=_SHAPE)
    ] = 8,
    hidden_size: Annotated[
        int, typer.Option(min=1, metavar="N", help="Values of a token.", rich_help_panel=_SHAPE)
    ] = 2048,
    intermediate_size: Annotated[
        int, typer.Option(min=1, metavar="N", help="Values inside an expert.", rich_help_panel=_SHAPE)
    ] = 768,
) -> None:
    """Measure memory, arithmetic and the expert kernels: each format, rows per expert, instruction set.

    Weights are read from DRAM, and the machine's limits are measured beside each figure. The machine should be idle.
    The default takes about two minutes on two cores, --full at least a quarter of an hour.
    """
    check_output(json_file or STANDARD_OUTPUT)
    # What follows imports torch, which takes seconds.
    from ktqueue.bench.experts import Load, Sweep, run_sweep, sweep_report
    from ktqueue.bench.machine import Probes
    from ktqueue.bench.roofline import LayerShape
    from ktqueue.cli.bench.tables import show_machine, show_points
    from ktqueue.cli.terminal.progress import Bar
    from ktqueue.operators import native

    if experts_per_token > num_experts:
        raise UsageFault(f"--experts-per-token must be at most --num-experts, got {experts_per_token} of {num_experts}")
    rows = FULL_ROWS if full else QUICK_ROWS
    loads = [Load(n) for n in numbers("--per-expert", per_expert or ("" if tokens else rows), most=MAX_ROWS)]
    loads += [Load(n, routed=True) for n in numbers("--tokens", tokens or "", most=MAX_ROWS)]
    sweep = Sweep(
        shape=LayerShape(
            hidden=hidden_size, intermediate=intermediate_size, experts=num_experts, experts_per_token=experts_per_token
        ),
        quants=_names("--formats", (formats or ("all" if full else QUICK_FORMATS)).upper(), native.QUANTS, pairs=True),
        isas=_names("--isa", (isa or ("all" if full else _best_isa())).lower(), native.isas()),
        loads=tuple(loads),
        seconds=seconds,
        batch_invariant=batch_invariant,
        memory=None if memory is None else size("--memory", memory),
    )
    _check_memory(sweep)
    load_before = os.getloadavg()[0]
    native.set_threads(threads, torch_threads=1)
    probes = Probes(sweep.memory and PROBE_SHARE * sweep.memory)
    tables = json_file != STANDARD_OUTPUT
    machine = probes.machine()
    if tables:
        show_machine(machine)
    points: list[KernelFigure] = []
    try:
        with Bar("experts", len(sweep)) as bar:
            points.extend(run_sweep(sweep, probes, lambda done, note: bar.update(done, note=note)))
    finally:  # an interrupted sweep shows the figures that it has
        if tables:
            show_points(points)
        if json_file is not None:
            write_report(json_file, sweep_report(machine, sweep, points, load_before=load_before))


def _best_isa() -> str:
    from ktqueue.operators import native

    try:
        return native.isa()
    except ValueError as error:  # of KTQUEUE_ISA
        raise UsageFault(str(error)) from error


def _names(flag: str, text: str, known: tuple[str, ...], *, pairs: bool = False) -> tuple[str, ...]:
    """The names of a comma-separated list; `all` is every known name. pairs: two names may be joined by a slash."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if [name.lower() for name in names] == ["all"]:
        return known
    for name in names or ("",):
        parts = name.split("/") if pairs else [name]
        if len(parts) > 2 or not set(parts) <= set(known):
            raise UsageFault(f"{flag}: this machine has {', '.join(known)}, got {name!r}")
    return names


def _check_memory(sweep: "Sweep") -> None:
    """Raise UsageFault if the layers do not fit in memory."""
    from ktqueue.bench.experts import sweep_memory
    from ktqueue.core.units import format_bytes
    from ktqueue.workers.startup.memory_bandwidth import cache_sizes

    try:
        needed = sweep_memory(sweep, cache_sizes())
    except ValueError as error:
        raise UsageFault(str(error)) from error
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > available:
        hint = "; --tokens needs memory for all experts" if any(load.routed for load in sweep.loads) else ""
        raise UsageFault(
            f"this needs {format_bytes(needed)} of memory, but only {format_bytes(available)} are free{hint}"
        )
