"""`ktqueue imatrix`: collect an importance matrix over a text, which `ktqueue convert --imatrix` takes."""

from pathlib import Path
from typing import Annotated

import typer

from ktqueue.cli.model import say
from ktqueue.cli.terminal.failures import UsageFault, check_output
from ktqueue.core.config import EngineConfig


def imatrix(
    model: Annotated[
        str, typer.Option("--model", "-m", metavar="M", help="Hugging Face folder, GGUF file, or hf:OWNER/NAME.")
    ],
    text: Annotated[
        Path,
        typer.Option("--text", "-f", "--file", exists=True, dir_okay=False, help="Text in UTF-8, like what is served."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path("imatrix.gguf"),
    chunk_tokens: Annotated[int, typer.Option("--ctx-size", "-c", min=1, help="Tokens of a chunk.")] = 512,
    chunks: Annotated[
        int | None, typer.Option("--chunks", min=1, help="Chunks to read.", show_default="all that are whole")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")] = False,
) -> None:
    """Collect an importance matrix: the mean squares of what each matrix is multiplied by, over a text.

    The file is one of llama-imatrix, which llama-quantize reads too. The model is computed in float32 on the CPU, and
    its weights are read once for every 4,096 tokens."""
    from ktqueue.cli.terminal.console import notes
    from ktqueue.cli.terminal.progress import Bar
    from ktqueue.loading.calibrate import calibrate, read_text, unused_experts
    from ktqueue.loading.gguf.importance import write_importance
    from ktqueue.loading.model_path import on_this_machine

    if output.exists() and not overwrite:
        raise UsageFault(f"{output} exists (--overwrite replaces it)")
    check_output(output)
    path = str(on_this_machine(EngineConfig(model=model), say).model)
    with Bar("calibrating") as bar:
        sums, read = calibrate(path, read_text(text), chunk_tokens=chunk_tokens, chunks=chunks, progress=bar.update)
    write_importance(output, sums, text=text.name, chunks=read, chunk_tokens=chunk_tokens)
    for line in unused_experts(sums):
        notes().print(line, markup=False)
    notes().print(
        f"{output}  {read} chunk{'s' * (read != 1)} of {chunk_tokens} tokens, {len(sums)} matrices", markup=False
    )
