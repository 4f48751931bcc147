"""The model that a command names: checked, and downloaded if it is on the Hugging Face hub."""

from dataclasses import replace

from ktqueue.cli.terminal.console import notes
from ktqueue.core.config import Config


def with_model(config: Config, *, runs: bool = True) -> Config:
    """Return the settings with a model on this machine. A model of the hub is downloaded. If the model `runs` then, a
    line says that it leaves a GPU unused.

    This comes before anything is started. Raises CheckpointError, ConfigError or Unavailable if there is no such model,
    RuleError if there are no such rules, and ConfigError for a device that no engine supports.
    """
    from ktqueue.loading.model_path import DEMO, on_this_machine
    from ktqueue.loading.rules import rules_file
    from ktqueue.workers.startup.device import check_device_name, has_unused_gpu

    check_device_name(config.engine.device)
    if runs and config.engine.model != DEMO and has_unused_gpu(config.engine.device):
        say(f"the GPU is not used: `ktqueue fit {config.engine.model}` writes the flags that use it")
    rules_file(config.engine.rules)
    return replace(config, engine=on_this_machine(config.engine, say))


def say(text: str) -> None:
    """Write a line of progress to standard error."""
    notes().print(text, markup=False, soft_wrap=True)
