"""`ktqueue fit`: does a model run here, and with which flags?"""

import shlex
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktqueue.cli.flags import AsJson, CommonFlags, EngineFlags, ModelName, expand, settings
from ktqueue.cli.model import with_model
from ktqueue.cli.terminal.console import escaped, results, table, write_json
from ktqueue.cli.terminal.failures import ExitCode
from ktqueue.core.config import EngineConfig
from ktqueue.core.errors import ConfigError, Unavailable
from ktqueue.core.hub_model import PREFIX, parse
from ktqueue.core.settings.setting import settings_of
from ktqueue.core.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from ktqueue.workers.startup.fit import Fit
    from ktqueue.workers.startup.machine import MachineResources

ALWAYS_SHOWN = ("max_model_len", "max_num_seqs", "kv_cache_bytes", "gpu_expert_memory_bytes")
MIB = 1 << 20


@expand
def fit(
    common: CommonFlags,
    engine: EngineFlags,
    name: ModelName = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option("--gpu-memory", metavar="SIZE", help="Free memory of the GPU.", show_default="this machine's"),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option("--host-memory", metavar="SIZE", help="Free memory of the host.", show_default="this machine's"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Does a model run here, and with which flags? The exit code is 0 for yes and 1 for no.

    Looks at host, GPU, bus and file, adds up the memory that is needed, and writes the command to run. Flags that you
    set are not changed. No weights are loaded. A model of the hub is downloaded first, unless it is too large anyway.
    --gpu-memory and --host-memory describe another machine.
    """
    from ktqueue.workers.startup.build import check_choices, report_of
    from ktqueue.workers.startup.fit import Fit, choose_settings
    from ktqueue.workers.startup.machine import detect_resources

    requested = settings(common, engine=engine if name is None else replace(engine, model=name)).engine
    check_choices(requested)
    device = engine.device or (requested.device if requested.on_gpu else None)
    machine = _asked(detect_resources(device), gpu_memory, host_memory)
    if too_large := _too_large(requested.model, machine):
        found = Fit(config=requested, host={}, host_limit=machine.host_available, why_not=too_large)
    else:
        local = with_model(replace(settings(common), engine=requested), runs=False).engine
        fixed = [
            described.name
            for described in settings_of("engine", EngineConfig)
            if getattr(requested, described.name) != described.default
        ]
        fixed += [key for key, value in asdict(engine).items() if value is not None]
        found = choose_settings(local, machine, report_of, device=device, fixed=fixed)
    command = _command(replace(found.config, model=requested.model, served_model_name=requested.served_model_name))
    if as_json:
        answer = {"fits": found.fits, "command": command if found.fits else None, "machine": asdict(machine)}
        write_json(answer | asdict(found))
    else:
        _show(found, machine, command, requested.model)
    if not found.fits:
        raise typer.Exit(ExitCode.FAILED)


def _too_large(model: str, machine: "MachineResources") -> str:
    """Why the files of a hub model are too large for this machine, before they are downloaded. Empty if they fit."""
    if not model.startswith(PREFIX):
        return ""
    from ktqueue.loading.huggingface import hub

    try:
        size = hub.size(parse(model))
    except Unavailable:  # it may be in the cache
        return ""
    free = machine.host_available + (machine.gpu.free if machine.gpu is not None else 0)
    if size <= free:
        return ""
    return f"its files are {format_bytes(size)}, host and GPU have {format_bytes(free)} free; nothing was downloaded"


def _asked(machine: "MachineResources", gpu_memory: str | None, host_memory: str | None) -> "MachineResources":
    """Return the machine with the memory that the flags give it."""
    from ktqueue.workers.startup.machine import Gpu

    if gpu_memory is not None:
        size = _size("--gpu-memory", gpu_memory)
        machine = replace(
            machine, gpu=Gpu(name="a GPU of --gpu-memory", total=size, free=size) if size else None, no_gpu=""
        )
    if host_memory is not None:
        machine = replace(machine, host_available=_size("--host-memory", host_memory))
    return machine


def _size(flag: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{flag} must be a size such as 80GiB, got {text!r}", param=flag, value=text) from error


def _command(config: EngineConfig) -> str:
    """Return the whole command: the model, and each flag that is not its default or was chosen for this machine."""
    words = ["ktqueue", "up", "--model", config.model]
    for described in settings_of("engine", EngineConfig):
        key, value = described.name, getattr(config, described.name)
        chosen = key in ALWAYS_SHOWN and value
        if not described.about.flags or key == "model" or value is None or (value == described.default and not chosen):
            continue
        flag = described.about.flags[0]
        if isinstance(value, bool):
            on, _, off = flag.partition("/")
            words.append(on if value else off)
        elif isinstance(value, tuple):
            words += [word for name in value for word in (flag, name)]
        else:
            words += [flag, f"{value // MIB}MiB" if key.endswith("_bytes") and value >= MIB else str(value)]
    return shlex.join(words)


def _show(found: "Fit", machine: "MachineResources", command: str, model: str) -> None:
    console = results()
    gpu = machine.gpu
    about_gpu = machine.no_gpu or "no GPU"
    if gpu is not None:
        bus = f", bus {gpu.bus / 1e9:.1f} GB/s" if gpu.bus else ""
        about_gpu = f"{gpu.name}, {format_bytes(gpu.free)} of {format_bytes(gpu.total)} free{bus}"
    console.print(
        f"host  {machine.cpu}, {machine.cores} CPUs, {format_bytes(machine.host_available)} free", markup=False
    )
    console.print(f"GPU   {about_gpu}", markup=False, soft_wrap=True)
    for place, parts, limit in (("host", found.host, found.host_limit), ("GPU", found.gpu, found.gpu_limit)):
        if parts:
            console.print()
            console.print(_sum(place, parts, limit), markup=False)
    if found.tokens:
        rows = found.config.rows
        console.print(
            f"\nThe cache takes {format_bytes(found.token_bytes)} a token: it holds {found.tokens:,} tokens, a context "
            f"of {found.config.max_model_len:,}, {rows} sequences of {found.tokens // rows:,} at once.",
            markup=False,
            soft_wrap=True,
        )
    for note in found.notes:
        console.print(note, markup=False, soft_wrap=True)
    if found.fits:
        console.print(f"\n[bold green]yes[/], {escaped(model)} runs here:\n", soft_wrap=True)
        console.print(f"  {command}", markup=False, soft_wrap=True)
    else:
        why_not = escaped(f"{model} does not run here: {found.why_not}")
        console.print(f"\n[bold red]no[/], {why_not}", soft_wrap=True)


def _sum(place: str, parts: dict[str, int], limit: int) -> Any:
    rows = [(what, format_bytes(count)) for what, count in parts.items()]
    listing = table((f"memory of the {place}", "bytes"), rows, right=("bytes",))
    listing.add_section()
    listing.add_row("in all", format_bytes(sum(parts.values())))
    listing.add_row("free now", format_bytes(limit))
    return listing
