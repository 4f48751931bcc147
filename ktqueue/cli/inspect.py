"""`ktqueue inspect`: what a model is made of and where each part would go."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktqueue.cli.console import results, table, write_json
from ktqueue.cli.flags import AsJson, CommonFlags, EngineFlags, expand, settings
from ktqueue.core.units import format_bytes

if TYPE_CHECKING:
    from ktqueue.loading.inspect import Report

WIDE = 120  # columns: room for everything


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
    columns = ["module", "count", "operator", "class", "device", "stored as", "in file", "loaded"]
    places = {(row.operator, row.device) for row in report.rows}
    if console.width < WIDE:
        dropped = ["count", "class"]
        if len(places) == 1:  # said once, so that there is room for names
            operator, device = places.pop()
            console.print(f"operator {operator}, device {device}\n", markup=False)
            dropped += ["operator", "device"]
        columns = [column for column in columns if column not in dropped]
    made = table(columns, right=("count", "in file", "loaded"))
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
        made.add_row(*(cells[column] for column in columns))
    made.add_section()
    for device, count in report.device_bytes.items():
        in_file = sum(row.file_bytes for row in report.rows if row.device == device)
        total = {"module": "total", "device": device, "in file": format_bytes(in_file), "loaded": format_bytes(count)}
        made.add_row(*(total.get(column, "") for column in columns))
    console.print(made, markup=False)
