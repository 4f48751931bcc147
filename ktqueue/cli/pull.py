"""`ktqueue pull`: download models from the Hugging Face hub."""

from typing import Annotated

import typer

from ktqueue.cli.model import say
from ktqueue.cli.terminal.console import write
from ktqueue.core.config import EngineConfig
from ktqueue.core.hub_model import PREFIX


def pull(
    names: Annotated[
        list[str],
        typer.Argument(metavar="OWNER/NAME[:QUANT]...", help="Models of the Hugging Face hub, with or without hf:."),
    ],
) -> None:
    """Download models from the Hugging Face hub into its cache, and write the local path of each.

    An interrupted download continues where it stopped. HF_TOKEN, HF_HOME and the other variables of huggingface_hub
    are used. `ktqueue up --model hf:OWNER/NAME:QUANT` downloads too.
    """
    from ktqueue.loading.model_path import on_this_machine

    for name in names:
        model = PREFIX + name.removeprefix(PREFIX)
        write(f"{on_this_machine(EngineConfig(model=model), say).model}\n")
