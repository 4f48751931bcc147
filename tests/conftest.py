"""Fixtures of all tests: a private Redis for the session, an empty one for each test, the shared test data, random
weights of every format."""

import gc
import logging
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    from triton.runtime.interpreter import interpreter_builder

    # Half of the interpreter's time went into looking for overflows, which it reports in its debug mode only.
    interpreter_builder.options = replace(
        interpreter_builder.options, sanitize_overflow=interpreter_builder.options.debug
    )

import numpy as np
import pytest
import redis
from installed import installed_bin as install
from preloaded import preloaded
from redis_fleet import ClusterFleet, SentinelFleet
from stored_blocks import block_size
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling, Scheduling
from xdist.workermanage import WorkerController

from ktqueue.broker.keys import Keys
from ktqueue.broker.redis.private_server import PrivateServer
from ktqueue.core import garbage
from ktqueue.core.config import BrokerConfig
from ktqueue.operators import native

TESTS = Path(__file__).parent
WAITING = ("broker", "gateway", "workers")  # folders of tests that wait for other processes most of their time
TOGETHER = ("cli", "e2e")  # folders whose files share a running installation, so that one process must run them
LEFT_OUT = pytest.StashKey[Counter[str]]()  # how many tests, by the reason
LONG = 20_000  # milliseconds that a server of a fleet may be silent: these tests want no failover

# Offsets of the halfs in a block, and their size for weights of about 0.1. All other bytes may be anything.
HALF_SCALES: dict[str, tuple[tuple[int, ...], float]] = {
    "Q4_0": ((0,), 0.02),
    "Q4_1": ((0, 2), 0.01),
    "Q5_0": ((0,), 0.02),
    "Q5_1": ((0, 2), 0.005),
    "Q8_0": ((0,), 0.001),
    "Q2_K": ((80, 82), 0.004),
    "Q3_K": ((108,), 0.002),
    "Q4_K": ((0, 2), 0.0005),
    "Q5_K": ((0, 2), 0.0003),
    "Q6_K": ((208,), 0.00003),
    "IQ4_NL": ((0,), 0.001),
    "IQ4_XS": ((0,), 0.00006),
    "IQ2_XXS": ((0,), 0.003),
    "IQ2_XS": ((0,), 0.003),
    "IQ2_S": ((0,), 0.003),
    "IQ3_XXS": ((0,), 0.001),
    "IQ3_S": ((0,), 0.0007),
    "IQ1_S": ((0,), 0.015),
    "UINT4": ((0,), 0.02),
    "TQ1_0": ((52,), 0.1),
    "TQ2_0": ((64,), 0.1),
}


def pytest_configure() -> None:
    """Let Ctrl-C reach the processes under test, also where the tests run in a background that ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    native.set_threads(1)  # and of torch: several processes run tests, and idle threads spin on the CPUs of the others
    garbage.collect_seldom()
    gc.disable()  # a third of the time of collecting tests is the garbage collector's walk over a million objects


def lack(item: pytest.Item) -> str:
    """Why a test cannot run on this machine, if its marks say so; else empty."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        return "there is no CUDA device"
    mark = item.get_closest_marker("skip")
    return str(mark.kwargs["reason"]) if mark else ""


@pytest.hookimpl(trylast=True)  # after `-m`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the long tests if `--without-long` asks for that, and mix files that wait with files that compute.

    Tests whose marks say that they cannot run are left out too: a quarter of all, and to skip one takes milliseconds.
    The folders of TOGETHER come first, since each is the work of one process.
    """
    if config.getoption("--without-long"):
        lacks = [lack(item) for item in items]
        left_out: Counter[str] = Counter(filter(None, lacks))
        config.stash[LEFT_OUT] = left_out
        if hasattr(config, "workeroutput"):
            config.workeroutput["left_out"] = dict(left_out)
        runs = [not reason and not item.get_closest_marker("long") for item, reason in zip(items, lacks, strict=True)]
        config.hook.pytest_deselected(items=[item for item, run in zip(items, runs, strict=True) if not run])
        items[:] = [item for item, run in zip(items, runs, strict=True) if run]
    places: dict[Path, float] = {}
    files = list(dict.fromkeys(item.path for item in items))
    waiting = [path for path in files if any((TESTS / folder) in path.parents for folder in WAITING)]
    for group in (waiting, [path for path in files if path not in waiting]):
        places |= {path: (index + 0.5) / len(group) for index, path in enumerate(group)}
    for place, folder in enumerate(TOGETHER, -len(TOGETHER)):
        places |= dict.fromkeys([path for path in files if TESTS / folder in path.parents], place)
    items.sort(key=lambda item: places[item.path])


class FilesAndFolders(LoadFileScheduling):  # type: ignore[misc]
    """Gives a process whole files, and the folders of TOGETHER at once."""

    def _split_scope(self, nodeid: str) -> str:
        """The file of a test, or its folder."""
        return next((folder for folder in TOGETHER if nodeid.startswith(f"tests/{folder}/")), nodeid.split("::")[0])

    def _pending_of(self, workload: dict[str, dict[str, bool]]) -> int:
        """How many tests a process has left. It runs its files in order: those before a finished one are finished."""
        unfinished = takewhile(lambda tests: not all(tests.values()), reversed(workload.values()))
        return sum(list(tests.values()).count(False) for tests in unfinished)


@pytest.hookimpl(optionalhook=True)  # unknown with -p no:xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """How `--dist loadfile` shares the tests out among processes."""
    return FilesAndFolders(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: WorkerController) -> None:
    """Keep what a process has left out: all of them leave out the same."""
    if hasattr(node, "workeroutput"):
        node.config.stash[LEFT_OUT] = Counter(node.workeroutput.get("left_out", {}))


def pytest_collection_finish() -> None:
    """Collect garbage again from here on, but not among what the imports and the collection made.

    Loggers of torch and transformers propagate: else pytest gives handlers to each of sixty, six times a test.
    """
    for logger in logging.getLogger().manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def batch_invariant_kernels() -> None:
    """Compute a token alike in every batch, as a CPU worker does: tests compare runs in different batches. And on one
    thread: processes that run tests share the CPUs, so a kernel of several threads waits for one that has no CPU."""
    native.set_batch_invariant(True)
    native.set_threads(1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was skipped or left out: a line for each reason, with how many tests it kept from running."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    reasons.update(terminalreporter.config.stash.get(LEFT_OUT, None) or {})
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count}: {reason}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """What the tests run on: `make fleet` runs those of the broker on each. Which tests run: `make test`."""
    parser.addoption("--redis", choices=("private", "sentinel", "cluster"), default="private", help="kind of server")
    parser.addoption("--without-long", action="store_true", help="leave out tests that are long or cannot run")


@pytest.fixture(scope="session")
def redis_fleet(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[SentinelFleet | ClusterFleet | None]:
    """The servers of `--redis`; None: the private one."""
    kind = request.config.getoption("--redis")
    folder = tmp_path_factory.mktemp("fleet")
    fleet: SentinelFleet | ClusterFleet | None = None
    if kind == "sentinel":
        fleet = SentinelFleet(folder, down=LONG)
    elif kind == "cluster":
        fleet = ClusterFleet(folder, Keys(BrokerConfig().prefix).tag, down=LONG)
    yield fleet
    if fleet is not None:
        fleet.stop()


@pytest.fixture(scope="session")
def redis_server(
    tmp_path_factory: pytest.TempPathFactory, redis_fleet: SentinelFleet | ClusterFleet | None
) -> Iterator[str]:
    """URL of one real server, or fleet, for the session."""
    if redis_fleet is not None:
        yield redis_fleet.url
        return
    server = PrivateServer()
    yield server.start(tmp_path_factory.mktemp("redis"))
    server.stop()


@pytest.fixture(scope="session")
def redis_direct(redis_server: str, redis_fleet: SentinelFleet | ClusterFleet | None) -> str:
    """URL of the server that has the data, for a plain client."""
    return redis_server if redis_fleet is None else redis_fleet.direct_url


@pytest.fixture
def redis_url(redis_server: str, redis_direct: str) -> str:
    """URL of a real server, or fleet, with an empty keyspace."""
    with redis.Redis.from_url(redis_direct) as client:
        client.flushall()
    return redis_server


@pytest.fixture
def broker_config(redis_url: str) -> BrokerConfig:
    """Settings for an empty server."""
    return BrokerConfig(url=redis_url)


@pytest.fixture(scope="session")
def quick_starts() -> Iterator[None]:
    """From here on, processes of `ktqueue` that the tests start themselves are forks of one that has its libraries."""
    with preloaded():
        yield


@pytest.fixture(scope="session")
def installed_bin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with `ktqueue` and `python` where the wheel of this tree is installed; one for the whole run."""
    folder = tmp_path_factory.getbasetemp()
    return install((folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "installed")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of test inputs that are too big for the repository, beside the checkout; skips where it is absent."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("there is no folder shared/data beside the clone")
    return folder


@pytest.fixture(scope="session")
def random_weights() -> Callable[..., np.ndarray[Any, np.dtype[np.uint8]]]:
    """random_weights(quant, count, seed=0) -> [bytes] of `count` weights in any of the formats.

    Weights are finite and about 0.1; every bit pattern of the quants and of the packed scales comes up.
    """

    def make(quant: str, count: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
        random = np.random.default_rng(seed)
        if quant in ("F32", "F16", "BF16"):
            values = random.normal(scale=0.1, size=count).astype("<f4")
            if quant == "BF16":
                return (values.view("<u4") >> 16).astype("<u2").view(np.uint8)
            return values.astype("<f2" if quant == "F16" else "<f4").view(np.uint8)
        elements, size = block_size(quant)
        blocks = random.integers(0, 256, (count // elements, size), dtype=np.uint8)
        if quant == "MXFP4":
            blocks[:, 0] = random.integers(120, 124, len(blocks))  # 2^-8 to 2^-5
            return blocks.reshape(-1)
        if quant == "NVFP4":
            blocks[:, :4] = random.integers(25, 39, (len(blocks), 4))  # 2^-5 to 2^-3
            return blocks.reshape(-1)
        if quant == "FP4":  # d and r are those of all rows; the scale of a weight is 2^-5 to 2^-3, as of NVFP4
            d = 0.0117 * random.uniform(0.5, 1.5)
            blocks[:, :8] = np.array([d, np.float16(d / 100)], "<f4").view(np.uint8)
            blocks[:, 8:12] = random.integers(76, 90, (len(blocks), 4))
            return blocks.reshape(-1)
        if quant == "FP8":
            blocks[:, :4] = (random.uniform(0.5, 2.0, len(blocks)) * 0.001).astype("<f4").view(np.uint8).reshape(-1, 4)
            np.copyto(blocks[:, 4:], 8, where=(blocks[:, 4:] & 127) == 127)
            return blocks.reshape(-1)
        if quant == "UINT4":
            blocks[:, 2] %= 16
        if quant == "IQ1_M":  # a digit of the half in the upper four bits of each word of scales
            halfs = (random.uniform(0.5, 2.0, len(blocks)) * 0.015).astype("<f2").view("<u2")
            words = blocks[:, 48:].copy().view("<u2") & 0x0FFF
            blocks[:, 48:] = (words | (halfs[:, None] >> np.arange(0, 16, 4) & 15) << 12).astype("<u2").view(np.uint8)
            return blocks.reshape(-1)
        offsets, scale = HALF_SCALES[quant]
        for offset in offsets:
            halfs = (random.uniform(0.5, 2.0, len(blocks)) * scale).astype("<f2")
            blocks[:, offset : offset + 2] = halfs.view(np.uint8).reshape(-1, 2)
        return blocks.reshape(-1)

    return make
