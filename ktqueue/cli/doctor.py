"""`ktqueue doctor`: can this machine run ktqueue? A function for each check, whose finding has a level and a fact.

The checks start no server, load no weights and change nothing.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ktqueue.cli.flags import AsJson, CommonFlags, EngineFlags, GatewayFlags, expand, settings
from ktqueue.cli.terminal.console import escaped, results, table, write_json
from ktqueue.cli.terminal.failures import ExitCode
from ktqueue.core.config import Config, EngineConfig
from ktqueue.core.errors import ConfigError, KtqueueError, Unavailable
from ktqueue.core.hub_model import PREFIX, parse
from ktqueue.core.units import format_bytes

if TYPE_CHECKING:
    from ktqueue.broker.broker import Broker
    from ktqueue.loading.model_report import ModelReport

PYTHONS = range(11, 15)  # minor versions: 3.11 to 3.14
CLIENT_PACKAGES = ("redis", "orjson", "typer", "rich", "httpx")
GATEWAY_PACKAGES = ("starlette", "uvicorn", "pydantic")
WORKER_PACKAGES = (
    "torch",
    "transformers",
    "huggingface_hub",
    "gguf",
    "safetensors",
    "tokenizers",
    "jinja2",
    "numpy",
    "pyyaml",
)
ARQ_PACKAGES = ("arq", "pydantic")
LEAST_FREE_DISK = 1 << 30  # bytes: the private server appends every step to a file


class Level(StrEnum):
    """How bad a finding is. Only `FAIL` makes the doctor fail."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    level: Level
    fact: str
    hint: str = ""


@expand
def doctor(common: CommonFlags, engine: EngineFlags, gateway: GatewayFlags, as_json: AsJson = False) -> None:
    """Check this machine: packages, kernels, cores, memory, model, Redis, port."""
    config = settings(common, engine=engine, gateway=gateway)
    findings = list(examine(config))
    failed = any(finding.level is Level.FAIL for finding in findings)
    if as_json:
        write_json(
            {
                "ok": not failed,
                "findings": [
                    {"name": f.name, "level": f.level.value, "fact": f.fact, "hint": f.hint or None} for f in findings
                ],
            }
        )
    else:
        colours = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}
        rows = [
            (
                f"[{colours[finding.level]}]{finding.level.value}[/]",
                finding.name,
                escaped(finding.fact) + (f"\n[dim]{escaped(finding.hint)}[/]" if finding.hint else ""),
            )
            for finding in findings
        ]
        results().print(table(("", "what", "found"), rows))
    if failed:
        raise typer.Exit(ExitCode.FAILED)


def examine(config: Config, available: int | None = None) -> Iterator[Finding]:
    """All findings, in the order of the report. `available`: bytes of memory, by default those of this machine."""
    yield _python()
    yield _packages("client packages", CLIENT_PACKAGES, Level.FAIL, "pip install ktqueue")
    yield _packages("gateway packages", GATEWAY_PACKAGES, Level.WARN, "pip install 'ktqueue[gateway]'")
    yield _packages("worker packages", WORKER_PACKAGES, Level.WARN, "pip install 'ktqueue[worker]'")
    yield _packages("arq packages", ARQ_PACKAGES, Level.WARN, "pip install 'ktqueue[arq]'; only the bridge needs them")
    yield _kernels()
    yield _cores()
    if config.engine.on_gpu:
        yield _gpu(config.engine.device)
    model, report = _model(config)
    yield _memory(config, report, available)
    yield model
    yield _state_dir(config)
    yield _redis_server(config)
    yield _redis_reachable(config)
    yield _port(config)


def _python() -> Finding:
    fact = f"{sys.version.split()[0]} ({sys.executable})"
    if sys.version_info.major == 3 and sys.version_info.minor in PYTHONS:
        return Finding("python", Level.OK, fact)
    return Finding("python", Level.FAIL, fact, f"use Python 3.{PYTHONS[0]} to 3.{PYTHONS[-1]}")


def _packages(name: str, wanted: tuple[str, ...], level: Level, hint: str) -> Finding:
    from importlib import metadata

    found: list[str] = []
    missing: list[str] = []
    for package in wanted:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            missing.append(package)
    if missing:
        return Finding(name, level, f"missing: {', '.join(missing)}", hint)
    return Finding(name, Level.OK, ", ".join(found))


def _kernels() -> Finding:
    try:
        from ktqueue.operators import native

        return Finding("kernels", Level.OK, f"instruction set {native.isa()} of {', '.join(native.isas())}")
    except ImportError as error:
        return Finding("kernels", Level.WARN, str(error), "pip install 'ktqueue[worker]'; only a worker needs them")
    except ValueError as error:
        return Finding("kernels", Level.FAIL, str(error), "unset KTQUEUE_ISA for the best that the CPU has")


def _cores() -> Finding:
    machine, ours = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    quota = _cgroup_quota()
    fact = f"{ours} of {machine} usable" + (f", quota {quota:g}" if quota is not None else "")
    if quota is not None and quota < ours:
        hint = f"a CPU quota below the cores throttles: set --threads {max(1, int(quota))}"
        return Finding("cores", Level.WARN, fact, hint)
    return Finding("cores", Level.OK, fact)


def _cgroup_quota() -> float | None:
    """CPUs that the control group (version 2) allows; None if there is no limit."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None


def _gpu(device: str) -> Finding:
    try:
        import torch

        from ktqueue.workers.startup.device import check_device_is_here, check_device_name

        check_device_name(device)
        check_device_is_here(device)
    except ImportError as error:
        return Finding("gpu", Level.WARN, f"{device}: not examined ({error})", "pip install 'ktqueue[worker]'")
    except ConfigError as error:
        return Finding("gpu", Level.FAIL, error.message, "`ktqueue fit` says what runs on the CPU")
    free, total = torch.cuda.mem_get_info(device)
    fact = f"{torch.cuda.get_device_name(device)}, {format_bytes(free)} of {format_bytes(total)} free"
    return Finding("gpu", Level.OK, fact)


def _memory(config: Config, report: "ModelReport | None", available: int | None) -> Finding:
    from ktqueue.workers.startup.host_memory import available_memory

    available = available_memory() if available is None else available
    cache, weights = config.engine.kv_cache_bytes or 0, 0
    fact = f"{format_bytes(available)} available"
    if report is not None:
        weights = report.device_bytes.get("cpu", 0)
        fact += f", {format_bytes(weights)} needed for weights"
    if cache:
        fact += f", {format_bytes(cache)} needed for the cache"
    if cache + weights > available:
        hint = "lower --kv-cache-bytes or use a smaller model; `ktqueue fit` shows what would run"
        return Finding("memory", Level.FAIL, fact, hint)
    return Finding("memory", Level.OK, fact)


def _model(config: Config) -> tuple[Finding, "ModelReport | None"]:
    """The finding about the model, and its report if it can be read."""
    name = config.engine.model
    hint = "`ktqueue fit` says more; a model is a .gguf file, a Hugging Face folder, hf:OWNER/NAME[:QUANT] or demo"
    try:
        from ktqueue.workers.startup.build import check_choices, report_of

        check_choices(config.engine)
        report = report_of(_without_download(config.engine))
    except ImportError as error:
        return Finding("model", Level.WARN, f"{name}: not read ({error})", "pip install 'ktqueue[worker]'"), None
    except Unavailable as error:
        return Finding(
            "model", Level.WARN, error.message, "`ktqueue pull` downloads it, and so does `ktqueue up`"
        ), None
    except (KtqueueError, OSError) as error:
        return Finding("model", Level.FAIL, str(error), hint), None
    if report.refusal is not None:
        return Finding("model", Level.FAIL, report.refusal, hint), report
    fact = f"{name}: {report.facts.architecture}, {report.parameters / 1e6:,.1f} M parameters"
    return Finding("model", Level.OK, fact), report


def _without_download(config: EngineConfig) -> EngineConfig:
    """Return the settings with the local path of a hub model. Raises Unavailable if it is not in the cache."""
    if not config.model.startswith(PREFIX):
        return config
    from ktqueue.loading.huggingface.hub import cached

    return replace(config, model=str(cached(parse(config.model), "the doctor downloads nothing")))


def _state_dir(config: Config) -> Finding:
    folder = Path(config.broker.state_dir).absolute()
    place = folder
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK | os.X_OK):
        return Finding("state folder", Level.FAIL, f"{folder}: {place} is not writable", "choose another --state-dir")
    disk = os.statvfs(place)
    free = disk.f_bavail * disk.f_frsize
    fact = f"{folder}, {format_bytes(free)} free"
    if free < LEAST_FREE_DISK:
        return Finding("state folder", Level.WARN, fact, "the journal file of the private Redis needs more space")
    return Finding("state folder", Level.OK, fact)


def _redis_server(config: Config) -> Finding:
    from ktqueue.broker.redis.private_server import find_program

    try:
        return Finding("redis program", Level.OK, find_program())
    except Unavailable as error:
        level = Level.WARN if config.broker.url is not None else Level.FAIL
        return Finding("redis program", level, error.message, "pip install 'ktqueue[embedded]'")


def _redis_reachable(config: Config) -> Finding:
    from ktqueue.broker.redis.private_server import running_url
    from ktqueue.cli.connection import ask

    if config.broker.url is None and running_url(config.broker.state_dir) is None:
        return Finding("redis", Level.OK, "none is running; `ktqueue up` starts a private one")
    try:
        workers, models = ask(config, _served)
    except KtqueueError as error:
        return Finding("redis", Level.FAIL, error.message, "check --redis-url and the server")
    if not workers:
        return Finding("redis", Level.WARN, "reachable, but no worker is running", "start one with `ktqueue worker`")
    return Finding("redis", Level.OK, f"reachable, {workers} worker(s) serve {', '.join(models)}")


async def _served(broker: "Broker") -> tuple[int, list[str]]:
    workers = await broker.models.workers()
    return len(workers), sorted({worker.model for worker in workers})


def _port(config: Config) -> Finding:
    from ktqueue.core.listeners import PortTaken, listen

    try:
        listen(config.gateway).close()
    except ConfigError as error:
        advice = f"choose another {error.param}"
        if isinstance(error, PortTaken):
            advice = f"a gateway may be running there; else {advice}"
        return Finding("port", Level.WARN, error.message, advice)
    return Finding("port", Level.OK, f"{config.gateway.host}:{config.gateway.port} is free")
