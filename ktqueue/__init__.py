"""Public face of ktqueue: the version, the client and the request types.

Importing this module loads nothing: the classes are imported on first use, and no torch ever.
"""

TYPE_CHECKING = False  # typing would be imported for it
if TYPE_CHECKING:
    from typing import Any

    from ktqueue.client import Client, SyncClient
    from ktqueue.core.request import GenerationRequest, SamplingParams

__version__ = "0.1.0"
__all__ = ["Client", "GenerationRequest", "SamplingParams", "SyncClient", "__version__"]

_MODULES = {
    "Client": "ktqueue.client",
    "SyncClient": "ktqueue.client",
    "GenerationRequest": "ktqueue.core.request",
    "SamplingParams": "ktqueue.core.request",
}


def __getattr__(name: str) -> "Any":
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'ktqueue' has no attribute {name!r}")
