"""The internals of uvicorn that the gateway relies on, and a check at start that the installed uvicorn has them.

`LimitedProtocol` overrides private methods of uvicorn's protocol, and `Http10` and `GatewayServer` use its attributes.
Another version of uvicorn may lack some. tests/contract/test_uvicorn.py checks their meaning; here only their names.
"""

import inspect
from collections.abc import Iterable, Mapping

import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from ktqueue.core.errors import ConfigError

INTERNALS: Mapping[type, tuple[str, ...]] = {
    HttpToolsProtocol: (
        # methods that are overridden or called
        "connection_made", "connection_lost", "data_received", "pause_writing", "resume_writing", "shutdown",
        "on_message_begin", "on_url", "on_header", "on_headers_complete", "on_body", "on_message_complete",
        "on_response_complete", "timeout_keep_alive_handler", "_start_asgi_task", "_unset_keepalive_if_required",
        # attributes that are read or set
        "client", "cycle", "flow", "loop", "parser", "pipeline", "scope", "server_state", "transport", "url",
    ),
    RequestResponseCycle: (
        "body", "chunked_encoding", "disconnected", "expected_content_length", "keep_alive", "message_event",
        "more_body", "response_complete", "response_started",
    ),
    FlowControl: ("pause_reading", "resume_reading", "write_paused"),
    ServerState: ("default_headers",),
    uvicorn.Server: (
        "startup", "shutdown", "handle_exit", "serve", "run", "config", "force_exit", "lifespan", "server_state",
        "servers", "should_exit", "started",
    ),
}  # fmt: skip


def missing_internals(internals: Mapping[type, Iterable[str]]) -> list[str]:
    """The internals that the installed uvicorn lacks, as `Class.name`."""
    return [
        f"{kind.__name__}.{name}"
        for kind, names in internals.items()
        for known in [_names_of(kind)]
        for name in names
        if name not in known
    ]


def check_uvicorn(internals: Mapping[type, Iterable[str]] = INTERNALS) -> None:
    """Raises ConfigError if the installed uvicorn lacks something that the gateway relies on."""
    missing = missing_internals(internals)
    if missing:
        raise ConfigError(
            f"the gateway cannot run with uvicorn {uvicorn.__version__}, which lacks {', '.join(missing)}: "
            "install the version in constraints.txt",
            param="uvicorn",
            value=uvicorn.__version__,
        )


def _names_of(kind: type) -> set[str]:
    """Names of a class's attributes, and the names that its methods use. Instance attributes are among those."""
    names = set(dir(kind))
    for _, method in inspect.getmembers(kind, inspect.isfunction):
        names.update(method.__code__.co_names)
    return names
