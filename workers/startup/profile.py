"""Starts the profile of an engine that is built, in the process that runs it."""

import logging
from dataclasses import asdict
from typing import Any

import torch

from ktqueue import __version__
from ktqueue.core.settings.profile import ProfileConfig
from ktqueue.operators import native
from ktqueue.operators.named_ranges import nvtx_range
from ktqueue.profiling.writer import RecordWriter
from ktqueue.workers.startup.build import Built
from ktqueue.workers.startup.machine import bus_bandwidth, cpu_name
from ktqueue.workers.startup.memory_bandwidth import memory_bandwidth

log = logging.getLogger(__name__)


def start_profile(config: ProfileConfig, built: Built, role: str) -> RecordWriter | None:
    """Record the engine's steps in `config.folder`; None if no folder is set. `role`: what the process is.

    Measures the memory's bandwidth first, for comparison. On a GPU the parts of steps get ranges of NVTX. The caller
    closes the writer after the last step. Raises ConfigError if the folder cannot be written.
    """
    if config.folder is None:
        return None
    writer = RecordWriter(config, {"role": role, **_facts(built)})
    built.engine.start_profile(writer, config.routing_seconds, nvtx_range if built.config.on_gpu else None)
    log.info("profiling into %s", config.folder)
    return writer


def _facts(built: Built) -> dict[str, Any]:
    """What the tables and plots of a profile say of the process. Bandwidths are in bytes per second."""
    engine = built.config
    facts: dict[str, Any] = {
        "version": __version__,
        "model": built.card.name,
        "architecture": built.card.architecture,
        "quantization": built.card.quantization,
        "cpu": cpu_name(),
        "threads": native.threads(),
        "isa": native.isa(),
        "device": engine.device,
        "memory_bandwidth": memory_bandwidth(),
        "engine": asdict(engine),
        "model_stats": dict(built.engine.model_stats()),
    }
    if engine.on_gpu:
        device = torch.device(engine.device)
        facts |= {"gpu": torch.cuda.get_device_name(device), "bus_bandwidth": bus_bandwidth(device)}
    return facts
