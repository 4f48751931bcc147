"""`ktqueue inspect`: what a model is made of and where each part would go."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktqueue.cli.console import results, table, write_json
from ktqueue.cli.flags import AsJson, CommonFlags, EngineFlags, expand, settings
from ktqueue.core.units import format_bytes

if TYPE_CHECKING:
    from ktqueue.loading.inspect import Report


@expand
def inspect(
    common: CommonFlags,
    engine: EngineFlags,
    name: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A .gguf file, a Hugging Face folder, or demo.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the plan of a model without loading its weights: module, operator, device, bytes."""
    from ktqueue.loading.inspect import inspect as examine
    from workers.startup import compute_dtype

    config = settings(common, engine=engine).engine
    report = examine(name or config.model, rules=config.rules, device=config.device, dtype=compute_dtype(config))
    if as_json:
        write_json(_plain(report))
    else:
        _show(report)


def _plain(report: "Report") -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(report)


def _show(report: "Report") -> None:
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
    numbers = ("count", "in file", "loaded")
    made = table(("module", "count", "operator", "device", "stored as", "in file", "loaded"), right=numbers)
    for row in report.rows:
        made.add_row(
            row.name,
            str(row.count),
            row.operator if row.operator != KEEP else f"[dim]{row.class_name}[/]",
            row.device,
            ", ".join(row.quants),
            format_bytes(row.file_bytes),
            format_bytes(row.device_bytes),
        )
    made.add_section()
    for device, count in report.device_bytes.items():
        in_file = sum(row.file_bytes for row in report.rows if row.device == device)
        made.add_row("total", "", "", device, "", format_bytes(in_file), format_bytes(count))
    console.print(made)
