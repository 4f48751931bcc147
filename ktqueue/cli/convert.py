"""`ktqueue convert`: write a Hugging Face folder, or a synthetic model, as one GGUF file."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ktqueue.cli.model import say
from ktqueue.cli.terminal.failures import UsageFault, check_output
from ktqueue.core.config import EngineConfig
from ktqueue.core.units import format_bytes

Quantization = StrEnum(
    "Quantization", "F32 F16 BF16 Q8_0 Q6_K Q5_K Q5_1 Q5_0 Q4_K Q4_1 Q4_0 IQ4_NL IQ4_XS MXFP4 Q3_K Q2_K"
)
"""Weight types that convert can write, by their names in lower case."""
Mixture = StrEnum("Mixture", "Q6_K Q5_K_M Q5_K_S Q4_K_M Q4_K_S IQ4_NL IQ4_XS Q3_K_M Q2_K")
"""Mixes of weight types, by llama.cpp's names in lower case."""


def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Hugging Face folder with config.json and safetensors; hf:OWNER/NAME to download one; or "
            "synthetic:SHAPE:QUANT, such as synthetic:qwen3-30b-a3b:q4_k_m: random weights in that shape, for "
            "measurements.",
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT.gguf", help="File to write.")],
    experts: Annotated[
        Quantization | None, typer.Option("--experts", help="Type of expert weights.", show_default="q4_0")
    ] = None,
    dense: Annotated[
        Quantization | None, typer.Option("--dense", help="Type of all other matrices.", show_default="f16")
    ] = None,
    mix: Annotated[
        Mixture | None,
        typer.Option("--type", help="Mix of types for all matrices, by llama.cpp's name, instead of the two above."),
    ] = None,
    importance: Annotated[
        Path | None,
        typer.Option("--imatrix", exists=True, dir_okay=False, help="Importance matrix, as llama-imatrix writes it."),
    ] = None,
    no_mtp: Annotated[
        bool, typer.Option("--no-mtp", help="Leave out layers that predict further tokens, which are not served.")
    ] = False,
    layers: Annotated[
        int | None, typer.Option("--layers", help="Layers of a synthetic model.", min=1, show_default="the shape's")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.gguf if it exists.")] = False,
) -> None:
    """Convert a Hugging Face model to GGUF: in a mix of types (--type), or experts and dense weights in their own."""
    if target.exists() and not overwrite:
        raise UsageFault(f"{target} exists (--overwrite replaces it)")
    check_output(target)
    from ktqueue.cli.terminal.console import notes
    from ktqueue.cli.terminal.progress import Bar
    from ktqueue.loading.model_path import SYNTHETIC_PREFIX, on_this_machine, resolve

    is_synthetic = source.startswith(SYNTHETIC_PREFIX)
    if is_synthetic and (experts or dense or mix or importance or no_mtp):
        raise UsageFault(
            "--type, --experts, --dense, --no-mtp and --imatrix cannot be used with a synthetic model: "
            "its name says the quantisation"
        )
    if mix and (experts or dense):
        raise UsageFault("--type sets the types of all matrices: leave out --experts and --dense")
    if layers and not is_synthetic:
        raise UsageFault("--layers can be used only with a synthetic model")
    folder = Path() if is_synthetic else Path(on_this_machine(EngineConfig(model=source), say).model)
    if not is_synthetic and resolve(str(folder)).is_file():
        raise UsageFault(f"{source} is already a GGUF file; convert needs a Hugging Face folder")
    # These import torch, which takes seconds.
    from ktqueue.loading.convert import convert as convert_model
    from ktqueue.loading.synthetic.checkpoint import write_synthetic

    left_out = ""
    with Bar("converting") as bar:
        if is_synthetic:
            write_synthetic(source, target, layers=layers, progress=bar.update)
        else:
            types = {"experts": (experts or Quantization.Q4_0).value, "dense": (dense or Quantization.F16).value}
            if mix:
                types = {"mix": mix.value}
            left_out = convert_model(
                folder, target, **types, importance=importance, next_tokens=not no_mtp, progress=bar.update
            )
    if left_out:
        notes().print(left_out, markup=False)
    notes().print(f"{target}  {format_bytes(target.stat().st_size)}", markup=False)
