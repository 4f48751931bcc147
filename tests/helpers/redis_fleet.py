"""Real fleets of Redis servers for tests: a master with a replica and three sentinels, and a cluster of masters.

All listen on 127.0.0.1 at free ports, and die with the test process.
"""

import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import redis

from ktqueue.broker.redis.private_server import PR_SET_PDEATHSIG, find_program
from ktqueue.broker.redis.topology import key_slot

SERVICE = "tales"
DOWN_MILLISECONDS = 1_500  # a server silent for so long is down, to sentinels and cluster nodes


def until(predicate: Callable[[], Any], seconds: float = 30.0) -> None:
    """Wait for a condition; a refused connection is a no."""
    end = time.monotonic() + seconds
    while True:
        try:
            if predicate():
                return
        except redis.RedisError:
            pass
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.02)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


class Server:
    """One server process. `settings`: lines of its configuration file."""

    def __init__(
        self, folder: Path, port: int, *settings: str, sentinel: bool = False, password: str | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = port
        self.folder = folder
        self._password = password
        self._words = [find_program(), str(folder / "redis.conf"), *(["--sentinel"] if sentinel else [])]
        lines = [f"port {port}", "bind 127.0.0.1", f"dir {folder}", f"logfile {folder / 'redis.log'}", "daemonize no"]
        if not sentinel:
            lines += ['save ""', "repl-diskless-sync-delay 0", "repl-ping-replica-period 1"]
        (folder / "redis.conf").write_text("\n".join([*lines, *settings]) + "\n")
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, again too, and wait until it answers."""
        library = ctypes.CDLL(None)
        self._process = subprocess.Popen(
            self._words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )
        until(lambda: self("PING"))

    def __call__(self, *words: str | int) -> Any:
        """One command on a connection of its own."""
        with redis.Redis(port=self.port, password=self._password, socket_timeout=5) as client:
            return client.execute_command(*words)

    def signal(self, number: int) -> None:
        """SIGSTOP, SIGCONT ..."""
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """kill -9, and wait for its end. Harmless when it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class SentinelFleet:
    """A master, a replica, three sentinels."""

    def __init__(self, folder: Path, *, down: int = DOWN_MILLISECONDS) -> None:
        """`down`: milliseconds until a silent master is given up."""
        first, second, *sentinels = free_ports(5)
        self.servers = [
            Server(folder / "first", first),
            Server(folder / "second", second, f"replicaof 127.0.0.1 {first}"),
        ]
        until(lambda: self.servers[1]("INFO", "replication")["master_link_status"] == "up")
        self.sentinels = [
            Server(
                folder / f"sentinel{port}",
                port,
                f"sentinel monitor {SERVICE} 127.0.0.1 {first} 2",
                f"sentinel down-after-milliseconds {SERVICE} {down}",
                f"sentinel failover-timeout {SERVICE} 5000",
                f"sentinel myid {port:040x}",
                *(
                    f"sentinel known-sentinel {SERVICE} 127.0.0.1 {other} {other:040x}"  # spares them the search
                    for other in sentinels
                    if other != port
                ),
                f"sentinel known-replica {SERVICE} 127.0.0.1 {second}",
                sentinel=True,
            )
            for port in sentinels
        ]
        self.url = f"redis+sentinel://{','.join(f'127.0.0.1:{port}' for port in sentinels)}/{SERVICE}"
        for sentinel in self.sentinels:
            until(partial(self._knows_all, sentinel))

    def _knows_all(self, sentinel: Server) -> bool:
        record = sentinel("SENTINEL", "MASTER", SERVICE)
        fields = dict(zip(record[::2], record[1::2], strict=True))
        return int(fields[b"num-other-sentinels"]) == 2 and int(fields[b"num-slaves"]) == 1

    @property
    def master(self) -> Server:
        """That of which a majority of the sentinels says so."""
        ports = [int(one("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)[1]) for one in self.sentinels]
        port = max(set(ports), key=ports.count)
        return next(one for one in self.servers if one.port == port)

    @property
    def replica(self) -> Server:
        """The other one."""
        return next(one for one in self.servers if one is not self.master)

    @property
    def direct_url(self) -> str:
        """Of the master."""
        return f"redis://127.0.0.1:{self.master.port}/0"

    def cut_off_replica(self) -> None:
        """From now on the replica learns nothing more, and runs no more, until SIGCONT."""
        self.replica.signal(signal.SIGSTOP)
        self.master("CLIENT", "KILL", "TYPE", "replica")

    def stop(self) -> None:
        """End all."""
        for one in (*self.sentinels, *self.servers):
            one.kill()


class ClusterFleet:
    """Three masters; `replicas` of the one that owns the slot of the tag."""

    def __init__(
        self,
        folder: Path,
        tag: str,
        *,
        replicas: int = 0,
        down: int = DOWN_MILLISECONDS,
        announced: Callable[[int], int] = lambda port: port,
    ) -> None:
        """`announced`: the port that clients are told of a node at a port."""
        self.slot = key_slot(tag)
        count = 3 + replicas
        ports = free_ports(2 * count)
        told = self._told = [announced(port) for port in ports[:count]]
        self.servers = [
            Server(
                folder / f"node{index}",
                ports[index],
                "cluster-enabled yes",
                f"cluster-port {ports[count + index]}",
                f"cluster-node-timeout {down}",
                "cluster-replica-validity-factor 0",
                f"cluster-announce-port {told[index]}",
            )
            for index in range(count)
        ]
        first = self.servers[0]
        cuts = (0, 5461, 10922, 16384)
        for index, one in enumerate(self.servers[:3]):
            one("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
            one("CLUSTER", "ADDSLOTSRANGE", cuts[index], cuts[index + 1] - 1)
        for index, one in enumerate(self.servers[1:], 1):
            first("CLUSTER", "MEET", "127.0.0.1", one.port, ports[count + index])
        until(lambda: all(len(self._nodes(one)) == count for one in self.servers))
        until(lambda: all(self.is_well(one) for one in self.servers))
        for one in self.servers[3:]:
            until(partial(self._replicates, one))
            until(partial(_is_linked, one))
        self.url = f"redis+cluster://{','.join(f'127.0.0.1:{port}' for port in told)}"

    def _replicates(self, server: Server) -> bool:
        return server("CLUSTER", "REPLICATE", self.identity(self.owner)) is not None

    def _nodes(self, one: Server) -> Any:
        return one("CLUSTER", "NODES").splitlines()

    def is_well(self, one: Server) -> bool:
        """Does this node see all slots served?"""
        return b"cluster_state:ok" in one("CLUSTER", "INFO")

    def identity(self, one: Server) -> str:
        """Its name in the cluster."""
        return str(one("CLUSTER", "MYID").decode())

    def owner_as_seen_by(self, one: Server) -> Server:
        """Who has the slot."""
        for low, high, owner, *_ in one("CLUSTER", "SLOTS"):
            if low <= self.slot <= high:
                return self.servers[self._told.index(owner[1])]
        raise AssertionError(f"nobody has slot {self.slot}")

    @property
    def owner(self) -> Server:
        """Who has the slot, as a living node sees it."""
        return self.owner_as_seen_by(next(one for one in self.servers if one._process))

    def move_slot(self, target: Server, *, between: Callable[[], None]) -> None:
        """Give the slot to another master, key by key; `between` is called when half of the keys are there."""
        source = self.owner
        target("CLUSTER", "SETSLOT", self.slot, "IMPORTING", self.identity(source))
        source("CLUSTER", "SETSLOT", self.slot, "MIGRATING", self.identity(target))
        keys = source("CLUSTER", "GETKEYSINSLOT", self.slot, 10_000)
        half = len(keys) // 2
        source("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys[:half])
        between()
        rest = source("CLUSTER", "GETKEYSINSLOT", self.slot, 10_000)
        source("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *rest)
        for one in (target, source):
            one("CLUSTER", "SETSLOT", self.slot, "NODE", self.identity(target))

    @property
    def direct_url(self) -> str:
        """Of the owner."""
        return f"redis://127.0.0.1:{self.owner.port}/0"

    def stop(self) -> None:
        """End all."""
        for one in self.servers:
            one.kill()


def _is_linked(replica: Server) -> bool:
    return bool(replica("INFO", "replication")["master_link_status"] == "up")
