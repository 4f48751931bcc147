"""Checks of settings that are addresses or origins. Both raise ConfigError naming the setting and the value."""

import re
from collections.abc import Iterable
from ipaddress import ip_network

from ktqueue.core.errors import ConfigError

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s@*]+")  # as browsers send it: no path, no slash at the end


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
