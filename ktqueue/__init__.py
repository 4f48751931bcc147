"""Public face of ktqueue: the version, the client and the request types.

Importing this module loads nothing heavy: `Client` is imported on first use, and no torch ever.
"""

from typing import TYPE_CHECKING, Any

from ktqueue.core.request import GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from ktqueue.client import Client, SyncClient

__version__ = "0.1.0"
__all__ = ["Client", "GenerationRequest", "SamplingParams", "SyncClient", "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("Client", "SyncClient"):
        from ktqueue import client

        return getattr(client, name)
    raise AttributeError(f"module 'ktqueue' has no attribute {name!r}")
