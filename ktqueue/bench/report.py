"""The report of a bench as plain data, with versions, time, and the load of the machine."""

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ktqueue import __version__
from ktqueue.bench.experts import KernelFigure, Sweep
from ktqueue.bench.machine import MachineLimits

FORMAT = 1  # of the JSON; raised when a name changes its meaning


def report(
    machine: MachineLimits, sweep: Sweep, points: Sequence[KernelFigure], *, load_before: float
) -> dict[str, Any]:
    """Return the report as JSON values. Figures are in bytes, seconds, operations and their quotients.

    load_before: `os.getloadavg()[0]` before the sweep.
    """
    return {
        "format": FORMAT,
        "ktqueue": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "taken": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "load_before": round(load_before, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "machine": asdict(machine),
        "shape": asdict(sweep.shape),
        "seconds_per_point": sweep.seconds,
        "points": [
            {
                **asdict(point),
                "bytes_per_second": point.bytes_per_second,
                "operations_per_second": point.operations_per_second,
                "bandwidth_share": point.bandwidth_share,
                "peak_share": point.peak_share,
                "share": point.share,
            }
            for point in points
        ],
    }
