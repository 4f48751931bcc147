"""`ktqueue inspect`: the parts of a model, and where each would be placed."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktqueue.cli.flags import AsJson, CommonFlags, EngineFlags, ModelName, expand, settings
from ktqueue.cli.model import with_model
from ktqueue.cli.terminal.console import results, table, write_json
from ktqueue.core.errors import CheckpointError, ConfigError
from ktqueue.core.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from ktqueue.engine.memory_plan import MemoryPlan
    from ktqueue.loading.model_report import ModelReport

WIDE = 120  # columns: wide enough for all columns


@expand
def inspect(
    common: CommonFlags,
    engine: EngineFlags,
    name: ModelName = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            "--gpu-memory", metavar="SIZE", help="Size of the GPU to plan for.", show_default="this machine's"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the plan of a model without loading its weights: module, operator, device and bytes of each part.

    With --device cuda also what the memory of host and GPU is needed for."""
    import torch

    from ktqueue.operators.gpu.device import has_warpgroups, multiplies_groups
    from ktqueue.workers.startup.build import check_choices, report_of
    from ktqueue.workers.startup.gpu_memory import host_memory_before_loading, plan_before_loading

    requested = settings(common, engine=engine if name is None else replace(engine, model=name))
    config = with_model(requested, runs=False).engine
    check_choices(config)
    if gpu_memory is not None and not config.on_gpu:
        raise ConfigError(f"--gpu-memory {gpu_memory} needs --device cuda", param="--gpu-memory", value=gpu_memory)
    if not as_json:
        _show_meanings(config.rules)
    report = report_of(config)
    plan, host = None, {}
    if config.on_gpu:
        here = gpu_memory is None and torch.cuda.is_available()
        decodes, warpgroups = here and multiplies_groups("cuda"), here and has_warpgroups("cuda")
        plan = plan_before_loading(
            report, config, _size(gpu_memory, config.device), decodes=decodes, warpgroups=warpgroups
        )
        host = host_memory_before_loading(report, config)
    if as_json:
        write_json(_plain(report, plan, host))
    else:
        _show(report)
        if plan is not None:
            _show_memory(plan, host, config.page_size)
    if report.refusal is not None:
        raise CheckpointError(report.refusal)


def _size(asked: str | None, device: str) -> int:
    """Bytes of the GPU. Raises ConfigError if there is no GPU and no size is given."""
    import torch

    if asked is None and torch.cuda.is_available():
        return torch.cuda.get_device_properties(device).total_memory
    if asked is None:
        raise ConfigError(
            f"--device {device} needs --gpu-memory, a size such as 80GiB, because this machine has no GPU",
            param="--gpu-memory",
        )
    try:
        return parse_bytes(asked)
    except ValueError as error:
        raise ConfigError.must_be("--gpu-memory", "a size such as 80GiB", asked) from error


def _plain(report: "ModelReport", plan: "MemoryPlan | None", host: dict[str, int]) -> dict[str, Any]:
    from dataclasses import asdict

    plain = asdict(report)
    return plain if plan is None else plain | {"memory": {**plan.parts(), "pages": plan.pages}, "host_memory": host}


def _show_memory(plan: "MemoryPlan", host: dict[str, int], page_size: int) -> None:
    console = results()
    for place, parts in (("host", host), ("GPU", plan.parts())):
        rows = [(what, format_bytes(count)) for what, count in parts.items()]
        console.print()
        console.print(table((f"memory of the {place}", "bytes"), rows, right=("bytes",)), markup=False)
    console.print(
        f"{plan.pages:,} pages hold {plan.pages * page_size:,} tokens; workspaces and graphs are estimates",
        markup=False,
    )


def _show_meanings(rules: str | None) -> None:
    """Print what each rule of a KTransformers file means here. Nothing is printed for rules in our own form."""
    from ktqueue.loading.rules import ktransformers_placement, rules_file

    placement = ktransformers_placement(file := rules_file(rules))
    if placement is None:
        return
    console = results()
    console.print(f"{file} has the form of KTransformers\n", soft_wrap=True, markup=False)
    lines = [(meaning.line, meaning.operator, meaning.text) for meaning in placement.meanings]
    lines += [(line, "refused", why) for line, why in placement.refusals]
    rows = [(str(line), operator, text) for line, operator, text in sorted(lines)]
    console.print(table(("line", "operator", "here"), rows, right=("line",)), markup=False)
    console.print()


def _show(report: "ModelReport") -> None:
    from ktqueue.loading.rules import KEEP

    console = results()
    facts = report.facts
    console.print(f"[bold]{report.source}[/]", soft_wrap=True)
    console.print(
        f"{facts.architecture}, {report.parameters / 1e6:,.1f} M parameters, {report.layers} layers, "
        f"mostly {facts.quantization}, context {facts.max_position_embeddings:,}, vocabulary {facts.vocab_size:,}\n",
        soft_wrap=True,
        markup=False,
    )
    columns = ["module", "count", "operator", "class", "device", "stored as", "in file", "loaded"]
    places = {(row.operator, row.device) for row in report.rows}
    if console.width < WIDE:
        dropped = ["count", "class"]
        if len(places) == 1:  # written once above the table, to leave room for names
            operator, device = places.pop()
            console.print(f"operator {operator}, device {device}\n", markup=False)
            dropped += ["operator", "device"]
        columns = [column for column in columns if column not in dropped]
    listing = table(columns, right=("count", "in file", "loaded"))
    for row in report.rows:
        cells = {
            "module": row.name,
            "count": str(row.count),
            "operator": row.operator if row.operator != KEEP else "",
            "class": row.class_name,
            "device": row.device,
            "stored as": ", ".join(row.quants),
            "in file": format_bytes(row.file_bytes) if row.file_bytes else "tied",
            "loaded": format_bytes(row.device_bytes),
        }
        listing.add_row(*(cells[column] for column in columns))
    listing.add_section()
    for device, count in report.device_bytes.items():
        in_file = sum(row.file_bytes for row in report.rows if row.device == device)
        total = {"module": "total", "device": device, "in file": format_bytes(in_file), "loaded": format_bytes(count)}
        listing.add_row(*(total.get(column, "") for column in columns))
    console.print(listing, markup=False)
