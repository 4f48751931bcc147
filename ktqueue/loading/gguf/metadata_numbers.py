"""Numbers out of GGUF metadata, checked. Knows no family."""

import math
from collections.abc import Mapping
from typing import Any

from ktqueue.core.errors import CheckpointError


def number(value: Any, kind: type, key: str, source: str) -> int | float:
    """`value` of metadata key `key` as a positive `kind`, int (below 2^31) or float. Raises CheckpointError."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind is int:
        good = good and isinstance(value, int) and 0 < value < 1 << 31
    elif good:
        good = 0 < value < 1e30
    if not good:
        raise CheckpointError(f"{source}: metadata key {key} must be a positive number, got {value!r}")
    return int(value) if kind is int else float(value)


def count(metadata: Mapping[str, Any], key: str, source: str) -> int:
    """The count under `key`, 0 where there is none. Raises CheckpointError."""
    value = metadata.get(key, 0)
    return 0 if value == 0 and not isinstance(value, bool) else int(number(value, int, key, source))
