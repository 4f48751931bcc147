"""Models that are named rather than given as files: `ktqueue pull`, and `--model hf:OWNER/NAME` of the other verbs."""

from dataclasses import replace
from typing import Annotated

import typer

from ktqueue.cli.console import notes, write
from ktqueue.core.config import Config, EngineConfig
from ktqueue.core.hub_model import PREFIX


def with_model(config: Config) -> Config:
    """The settings with a model that is on this machine: one of the hub is downloaded.

    Raises CheckpointError, ConfigError or Unavailable before anything else is done where there is no such model,
    RuleError where there are no such rules, and ConfigError for a device that no engine runs on.
    """
    from ktqueue.loading.model_path import on_this_machine
    from ktqueue.loading.rules import rules_file
    from ktqueue.workers.startup.device import check_device_name

    check_device_name(config.engine.device)
    rules_file(config.engine.rules)
    return replace(config, engine=on_this_machine(config.engine, say))


def pull(
    names: Annotated[
        list[str],
        typer.Argument(metavar="OWNER/NAME[:QUANT]...", help="Models of the Hugging Face hub, with or without hf:."),
    ],
) -> None:
    """Download models from the Hugging Face hub into its cache; each one's local path is written.

    A download that was cut short goes on where it stopped. HF_TOKEN, HF_HOME and the other variables of huggingface_hub
    are respected. `ktqueue up --model hf:OWNER/NAME:QUANT` downloads, too.
    """
    from ktqueue.loading.model_path import on_this_machine

    for name in names:
        model = PREFIX + name.removeprefix(PREFIX)
        write(f"{on_this_machine(EngineConfig(model=model), say).model}\n")


def say(text: str) -> None:
    """Write a line of progress to standard error."""
    notes().print(text, markup=False, soft_wrap=True)
