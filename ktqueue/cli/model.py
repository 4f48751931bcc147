"""The model that a command names: checked, and downloaded if it is on the Hugging Face hub."""

from dataclasses import replace

from ktqueue.cli.terminal.console import notes
from ktqueue.core.config import Config


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


def say(text: str) -> None:
    """Write a line of progress to standard error."""
    notes().print(text, markup=False, soft_wrap=True)
