"""Real fleets of Redis servers for tests: a master with a replica and three sentinels, and a cluster of masters.

All listen on 127.0.0.1 at free ports, and die with the test process.
"""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import redis
from processes import free_ports

from ktqueue.broker.redis.private_server import PR_SET_PDEATHSIG, find_program
from ktqueue.broker.redis.topology import key_slot

SERVICE = "tales"
DOWN_MILLISECONDS = 1_500  # sentinels and cluster nodes give up a server that is silent for this long


def until(predicate: Callable[[], Any], seconds: float = 30.0) -> None:
    """Wait until the predicate is true. A refused connection counts as false."""
    end = time.monotonic() + seconds
    while True:
        try:
            if predicate():
                return
        except redis.RedisError:
            pass
        assert time.monotonic() < end, "the condition never became true"
        time.sleep(0.02)


class Server:
    """A server process. `settings`: lines of its configuration file."""

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
        """Start the server, for the first time or again, and wait until it answers."""
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
        """Run a command over a new connection."""
        with redis.Redis(port=self.port, password=self._password, socket_timeout=5) as client:
            return client.execute_command(*words)

    @property
    def running(self) -> bool:
        """Whether it was started and not killed since."""
        return self._process is not None

    def signal(self, number: int) -> None:
        """Send a signal such as SIGSTOP to the process."""
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Kill the process with SIGKILL and wait for its end. Harmless if it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class SentinelFleet:
    """A master, a replica and three sentinels."""

    def __init__(self, folder: Path, *, down: int = DOWN_MILLISECONDS) -> None:
        """`down`: milliseconds after which the sentinels give up a silent master."""
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
                    f"sentinel known-sentinel {SERVICE} 127.0.0.1 {other} {other:040x}"  # so that they need not search
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
        """The master, according to a majority of the sentinels."""
        ports = [int(sentinel("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)[1]) for sentinel in self.sentinels]
        port = max(set(ports), key=ports.count)
        return next(server for server in self.servers if server.port == port)

    @property
    def replica(self) -> Server:
        """The server that is not the master."""
        return next(server for server in self.servers if server is not self.master)

    @property
    def direct_url(self) -> str:
        """The URL of the master itself, without sentinels."""
        return f"redis://127.0.0.1:{self.master.port}/0"

    def cut_off_replica(self) -> None:
        """Cut the replica off from the master and stop it, until SIGCONT."""
        self.replica.signal(signal.SIGSTOP)
        self.master("CLIENT", "KILL", "TYPE", "replica")

    def stop(self) -> None:
        """Kill all processes."""
        for server in (*self.sentinels, *self.servers):
            server.kill()


class ClusterFleet:
    """Three masters, and `replicas` of the master that owns the slot of the tag."""

    def __init__(
        self,
        folder: Path,
        tag: str,
        *,
        replicas: int = 0,
        down: int = DOWN_MILLISECONDS,
        announced: Callable[[int], int] = lambda port: port,
    ) -> None:
        """`announced`: returns the port that a node announces to clients, given the port on which it listens."""
        self.slot = key_slot(tag)
        count = 3 + replicas
        ports = free_ports(2 * count)
        announced_ports = self._announced_ports = [announced(port) for port in ports[:count]]
        self.servers = [
            Server(
                folder / f"node{index}",
                ports[index],
                "cluster-enabled yes",
                f"cluster-port {ports[count + index]}",
                f"cluster-node-timeout {down}",
                "cluster-replica-validity-factor 0",
                f"cluster-announce-port {announced_ports[index]}",
            )
            for index in range(count)
        ]
        first = self.servers[0]
        cuts = (0, 5461, 10922, 16384)
        for index, server in enumerate(self.servers[:3]):
            server("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
            server("CLUSTER", "ADDSLOTSRANGE", cuts[index], cuts[index + 1] - 1)
        for index, server in enumerate(self.servers[1:], 1):
            first("CLUSTER", "MEET", "127.0.0.1", server.port, ports[count + index])
        until(lambda: all(len(self._nodes(server)) == count for server in self.servers))
        until(lambda: all(self.is_well(server) for server in self.servers))
        for server in self.servers[3:]:
            until(partial(self._replicates, server))
            until(partial(_is_linked, server))
        self.url = f"redis+cluster://{','.join(f'127.0.0.1:{port}' for port in announced_ports)}"

    def _replicates(self, server: Server) -> bool:
        return server("CLUSTER", "REPLICATE", self.identity(self.owner)) is not None

    def _nodes(self, server: Server) -> Any:
        return server("CLUSTER", "NODES").splitlines()

    def is_well(self, server: Server) -> bool:
        """Return whether this node sees all slots served."""
        return b"cluster_state:ok" in server("CLUSTER", "INFO")

    def identity(self, server: Server) -> str:
        """Return the node's id in the cluster."""
        return str(server("CLUSTER", "MYID").decode())

    def owner_as_seen_by(self, server: Server) -> Server:
        """Return the owner of the tag's slot, as this node sees it."""
        for low, high, owner, *_ in server("CLUSTER", "SLOTS"):
            if low <= self.slot <= high:
                return self.servers[self._announced_ports.index(owner[1])]
        raise AssertionError(f"no node has slot {self.slot}")

    @property
    def owner(self) -> Server:
        """The owner of the tag's slot, as a running node sees it."""
        return self.owner_as_seen_by(next(server for server in self.servers if server.running))

    def move_slot(self, target: Server, *, between: Callable[[], None]) -> None:
        """Move the slot to another master, key by key. `between` is called after half of the keys."""
        source = self.owner
        target("CLUSTER", "SETSLOT", self.slot, "IMPORTING", self.identity(source))
        source("CLUSTER", "SETSLOT", self.slot, "MIGRATING", self.identity(target))
        keys = source("CLUSTER", "GETKEYSINSLOT", self.slot, 10_000)
        half = len(keys) // 2
        source("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys[:half])
        between()
        rest = source("CLUSTER", "GETKEYSINSLOT", self.slot, 10_000)
        source("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *rest)
        for server in (target, source):
            server("CLUSTER", "SETSLOT", self.slot, "NODE", self.identity(target))

    @property
    def direct_url(self) -> str:
        """The URL of the owner itself."""
        return f"redis://127.0.0.1:{self.owner.port}/0"

    def stop(self) -> None:
        """Kill all processes."""
        for server in self.servers:
            server.kill()


def _is_linked(replica: Server) -> bool:
    return bool(replica("INFO", "replication")["master_link_status"] == "up")
