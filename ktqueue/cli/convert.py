"""`ktqueue convert`: a Hugging Face folder to one GGUF file."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ktqueue.cli.failures import UsageFault
from ktqueue.core.units import format_bytes


class Quantization(StrEnum):
    """Weight types that convert can write."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"
    Q4_0 = "q4_0"


def convert(
    source: Annotated[Path, typer.Argument(metavar="HF_DIR", help="Folder with config.json and safetensors.")],
    target: Annotated[Path, typer.Argument(metavar="OUT.gguf", help="File to write.")],
    experts: Annotated[Quantization, typer.Option("--experts", help="Type of expert weights.")] = Quantization.Q4_0,
    dense: Annotated[Quantization, typer.Option("--dense", help="Type of all other matrices.")] = Quantization.F16,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.gguf if it exists.")] = False,
) -> None:
    """Convert a Hugging Face model to GGUF, experts and dense weights each in a type of their own."""
    from ktqueue.cli.console import notes
    from ktqueue.cli.progress import Bar
    from ktqueue.loading.convert import convert as convert_model

    if target.exists() and not overwrite:
        raise UsageFault(f"{target} exists (--overwrite replaces it)")
    with Bar("converting") as bar:
        convert_model(source, target, experts=experts.value, dense=dense.value, progress=bar.update)
    notes().print(f"{target}  {format_bytes(target.stat().st_size)}", markup=False)
