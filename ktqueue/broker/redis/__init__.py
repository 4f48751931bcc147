"""Connections to Redis: addresses, servers, failover, subscriptions. Knows no keys and no scripts."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _LoadedOnUse(ModuleType):
    """Stands for a module until something in it is used."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


# The library redis imports it for tokens of Azure, and with it cryptography: a tenth of the time of a short command.
sys.modules.setdefault("jwt", _LoadedOnUse("jwt"))
