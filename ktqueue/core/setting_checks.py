"""Checks of one setting each. All raise ConfigError naming the setting, its limit and its value."""

import math
import re
from collections.abc import Iterable
from ipaddress import ip_network

from ktqueue.core.errors import ConfigError

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s@*]+")  # as browsers send it: no path, no slash at the end


def at_least(config: object, name: str, low: float, section: str = "broker") -> None:
    """A finite number that is not below `low`."""
    value = getattr(config, name)
    if not low <= value < math.inf:  # NaN fails both
        raise _wrong(f"{section}.{name}", f"a number from {low:g} on", low, value)


def between(config: object, name: str, low: float, high: float, section: str = "broker") -> None:
    """A number from `low` to `high`."""
    value = getattr(config, name)
    if not low <= value <= high:
        raise _wrong(f"{section}.{name}", f"a number from {low:g} to {high:g}", f"{low:g} to {high:g}", value)


def one_of(config: object, name: str, choices: tuple[str, ...], section: str) -> None:
    """One of a few words."""
    value = getattr(config, name)
    if value not in choices:
        raise _wrong(f"{section}.{name}", f"one of {', '.join(choices)}", ", ".join(choices), value)


def networks(values: Iterable[str], setting: str) -> None:
    """IP addresses, or networks such as 10.0.0.0/8."""
    for value in values:
        try:
            ip_network(value, strict=False)
        except ValueError as error:
            raise _wrong(setting, "IP addresses or networks", "addresses or networks", value) from error


def origins(values: Iterable[str], setting: str) -> None:
    """Origins as browsers send them, or * for all."""
    for value in values:
        if value != "*" and not ORIGIN.fullmatch(value):
            limit = "* or scheme://host[:port]"
            raise _wrong(setting, "origins such as https://example.org:8443, or *", limit, value)


def _wrong(setting: str, wanted: str, limit: float | str, value: float | str) -> ConfigError:
    return ConfigError(f"{setting} must be {wanted}, got {value!r}", param=setting, limit=limit, value=value)
