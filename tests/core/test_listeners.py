"""Addresses on which a gateway listens, and the one error for those on which it cannot."""

import socket
from contextlib import closing
from typing import Any

import pytest
from processes import free_ports

from ktqueue.core.config import GatewayConfig
from ktqueue.core.errors import ConfigError
from ktqueue.core.listeners import PortTaken, listen


def test_all_addresses_of_a_host_get_one_port_and_are_free_again() -> None:
    with closing(listen(GatewayConfig(host="localhost", port=0, probe_port=0))) as listeners:
        port = listeners.port
        assert {listener.getsockname()[1] for listener in listeners.main} == {port}
        assert listeners.probes[0].getsockname()[1] != port
        socket.create_connection(("localhost", port)).close()
    listen(GatewayConfig(host="localhost", port=port)).close()


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("nowhere.invalid", "Name or service not known"),
        ("a..b", "no host can have this name"),
        ("a" * 64, "no host can have this name"),
        ("203.0.113.9", "Cannot assign requested address"),
    ],
)
def test_a_host_that_is_not_here_is_named(host: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"gateway.host {host}, gateway.port 0: .*{reason}") as raised:
        listen(GatewayConfig(host=host, port=0))
    assert (raised.value.param, raised.value.value) == ("gateway.host", host)


def test_a_port_that_is_taken_is_named_and_nothing_stays_open() -> None:
    free, taken = free_ports(2)
    with socket.create_server(("127.0.0.1", taken)):
        cases: list[tuple[dict[str, Any], str, int]] = [
            ({"port": taken}, "gateway.port", taken),
            ({"port": free, "probe_port": taken}, "gateway.probe_port", taken),
            ({"port": free, "probe_port": free}, "gateway.probe_port", free),
        ]
        for settings, key, port in cases:
            with pytest.raises(PortTaken, match=f"{key} {port}: Address already in use") as raised:
                listen(GatewayConfig(**settings))
            assert (raised.value.param, raised.value.value) == (key, port)
        listen(GatewayConfig(port=free)).close()
