"""A model's name on the Hugging Face hub: `hf:OWNER/NAME[:FILE-or-quantisation]`."""

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from ktqueue.core.errors import ConfigError

PREFIX = "hf:"
PART = re.compile(r"-(?P<number>\d+)-of-(?P<count>\d+)$")
"""End of the name of a split model's file, before .gguf or .safetensors."""
_REPOSITORY = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class HubModel:
    """`repository`: OWNER/NAME. `variant`: a GGUF file or its quantisation, or `safetensors`; None: the only one."""

    repository: str
    variant: str | None

    def __str__(self) -> str:
        """The name as a user types it."""
        return f"{PREFIX}{self.repository}" + (f":{self.variant}" if self.variant else "")

    @property
    def served_name(self) -> str:
        """The name that clients use when none is set: NAME, or NAME:VARIANT."""
        variant = PurePosixPath(self.variant or "").name.removesuffix(".gguf")
        return self.repository.partition("/")[2] + (f":{PART.sub('', variant)}" if variant else "")


def parse(model: str) -> HubModel:
    """Parse `hf:OWNER/NAME[:VARIANT]`. Raises ConfigError."""
    repository, _, variant = model.removeprefix(PREFIX).partition(":")
    if not _REPOSITORY.fullmatch(repository) or model.endswith(":"):
        raise ConfigError.must_be(
            "engine.model",
            f"{PREFIX}OWNER/NAME or {PREFIX}OWNER/NAME:QUANT, such as {PREFIX}Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M",
            model,
            limit=f"{PREFIX}OWNER/NAME[:QUANT]",
        )
    return HubModel(repository, variant or None)


def served_name(model: str) -> str:
    """The name under which workers serve `--model`: for an `hf:` model its served name, else the argument itself.

    Raises ConfigError.
    """
    return parse(model).served_name if model.startswith(PREFIX) else model
