"""TLS in front of a plain Redis, as a load balancer or stunnel does it, for servers that are built without it."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import trustme


class Authority:
    """A certificate authority of one test, its file, and what it signs."""

    def __init__(self, folder: Path) -> None:
        self._authority = trustme.CA()
        self._folder = folder
        self.file = folder / "ca.pem"
        self._authority.cert_pem.write_to_path(str(self.file))

    def certificate(self, name: str) -> tuple[Path, Path]:
        """Certificate and key for a host name or address, as files."""
        issued = self._authority.issue_cert(name)
        certificate, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        issued.cert_chain_pems[0].write_to_path(str(certificate))
        issued.private_key_pem.write_to_path(str(key))
        return certificate, key


class TlsFront:
    """Listens on 127.0.0.1 and passes on to a port there. Plain connections are passed on too (sentinels are plain)."""

    def __init__(self, target: int, certificate: tuple[Path, Path], clients: Authority | None = None) -> None:
        """`clients`: whose certificates clients must show; None: they need none."""
        self._target = target
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(*certificate)
        if clients is not None:
            self._context.verify_mode = ssl.CERT_REQUIRED
            self._context.load_verify_locations(clients.file)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self.secure = 0  # connections that spoke TLS
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "TlsFront":
        self._start(self._accept())
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(self._socket)
            self._start(self._serve(client))

    async def _serve(self, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        client.setblocking(False)
        ready = asyncio.Event()
        loop.add_reader(client, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(client)
        secure = client.recv(1, socket.MSG_PEEK) == b"\x16"  # a TLS record that begins a handshake
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        with contextlib.suppress(OSError):
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, client, ssl=self._context if secure else None
            )
            self.secure += secure
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            back, forth = await asyncio.open_connection("127.0.0.1", self._target)
            pumps = [asyncio.create_task(_pump(reader, forth)), asyncio.create_task(_pump(back, writer))]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
                for end in (writer, forth):
                    end.close()


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(1 << 16):
        target.write(data)
        await target.drain()
