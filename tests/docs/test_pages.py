"""Runs every page from top to bottom, as a reader would, in an empty folder with an installed ktqueue."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_runner import PageRunner
from pages import PYTHON, ROOT, SHELL, blocks, pages
from processes import free_ports

from ktqueue.broker.redis.private_server import PrivateServer

pytestmark = pytest.mark.installed

STARTS = re.compile(r"^ktqueue up\b", re.MULTILINE)  # other pages assume that `ktqueue up` runs
GATEWAY, SECOND = "127.0.0.1:8000", "8001"  # each page gets its own ports here
EVERYWHERE = "0.0.0.0"  # tests listen only on the loopback interface
RECEIVER = "9000"  # the port of the program that webhooks call
MODEL = "FILE.gguf"  # any model; here the file of the built-in model
REDIS = "redis://:PASSWORD@redis.internal:6379/0"  # the reader's own server

DEMO = [*ROOT.glob("ktqueue/demo/*.gguf"), *ROOT.glob("csrc/*/*.gguf")][0]  # the same file in both places
PROGRAMS = {
    str(page.relative_to(ROOT)): blocks(page)
    for page in pages()
    if any(block.language in (SHELL, PYTHON) and block.runnable.strip() for block in blocks(page))
}


@pytest.fixture(scope="module")
def running(installed_bin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """A running `ktqueue up`: its port, and the folder where it was started."""
    [port] = free_ports(1)
    with PageRunner(tmp_path_factory.mktemp("up"), installed_bin, port, {}) as runner:
        runner.shell("ktqueue up")
        yield port, runner.here


@pytest.mark.timeout(300)  # a page starts and stops some servers
@pytest.mark.parametrize("page", PROGRAMS)
def test_each_page_runs_as_printed(
    page: str, installed_bin: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> None:
    code = "".join(block.runnable for block in PROGRAMS[page])
    free, second, receiver = free_ports(3)
    port, folder = (free, None) if STARTS.search(code) else request.getfixturevalue("running")
    values = {
        GATEWAY: f"127.0.0.1:{port}",
        SECOND: str(second),
        EVERYWHERE: "127.0.0.1",
        RECEIVER: str(receiver),
        MODEL: str(DEMO),
    }
    server = PrivateServer()
    if REDIS in code:
        values[REDIS] = server.start(tmp_path_factory.mktemp("redis"), port=0)
    try:
        with PageRunner(tmp_path_factory.mktemp("page"), installed_bin, port, values) as runner:
            if folder is not None:
                (runner.here / ".ktqueue").symlink_to(folder / ".ktqueue")
            for block in PROGRAMS[page]:
                runner.run(block)
    finally:
        server.stop()
