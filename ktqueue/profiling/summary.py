"""Figures of a profile: steps by their number of rows, their parts, and the parts of requests."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ktqueue.profiling.folder import Line, ProcessProfile
from ktqueue.profiling.records import STEP_PARTS
from ktqueue.profiling.request_times import REQUEST_PARTS, RequestTimes

PROMPTS: Final = "prompts"
"""The bucket of steps that compute tokens of prompts."""


@dataclass(frozen=True, slots=True)
class Part:
    """Seconds of one part: its median and 95th percentile, and its share of the whole from 0 to 1."""

    name: str
    median: float
    p95: float
    share: float


@dataclass(frozen=True, slots=True)
class Bucket:
    """Steps with a similar number of rows. Seconds are of one step; bytes and seconds of experts are those of the CPU.

    bandwidth: bytes per second of the memory, by the probe; None: not known.
    """

    rows: str
    steps: int
    tokens: int
    seconds: float
    median: float
    p95: float
    parts: Sequence[Part]
    experts: int
    expert_bytes: int
    expert_seconds: float
    bus_bytes: int
    uses: int
    gpu_uses: int
    gpu_experts: int
    fetched_bytes: int
    bandwidth: float | None

    @property
    def tokens_per_second(self) -> float:
        """Computed tokens, of prompts too, per second of steps."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def expert_bandwidth(self) -> float:
        """Bytes per second that the CPU's experts read."""
        return self.expert_bytes / self.expert_seconds if self.expert_seconds else 0.0

    @property
    def found(self) -> float | None:
        """Share of the uses of experts that were in GPU memory, from 0 to 1; None: not counted."""
        return self.gpu_uses / self.uses if self.uses else None

    @property
    def floor(self) -> float | None:
        """Seconds that the memory needs for the experts of one step, by the probe; None: not known."""
        return self.expert_bytes / self.steps / self.bandwidth if self.bandwidth and self.expert_bytes else None


def percentile(values: Sequence[float], part: float) -> float:
    """The value below which `part` of the sorted `values` are, from 0 to 1; 0 of none."""
    return values[min(len(values) - 1, math.floor(part * len(values)))] if values else 0.0


def bucket_name(step: Line) -> str:
    """The bucket of a step: PROMPTS, or its rows as a range that ends at a power of two."""
    if step.get("prompt_tokens"):
        return PROMPTS
    rows = max(1, int(step["rows"]))
    end = 1 << (rows - 1).bit_length()
    return str(end) if end <= 2 else f"{end // 2 + 1}-{end}"


def buckets(process: ProcessProfile) -> list[Bucket]:
    """The steps of one process by their rows, fewest first; those with prompts are the last."""
    groups: dict[str, list[Line]] = {}
    for step in process.steps:
        groups.setdefault(bucket_name(step), []).append(step)

    def rank(name: str) -> float:
        return math.inf if name == PROMPTS else int(name.partition("-")[0])

    bandwidth = process.head.get("memory_bandwidth")
    return [_bucket(name, groups[name], bandwidth) for name in sorted(groups, key=rank)]


def _bucket(name: str, steps: Sequence[Line], bandwidth: float | None) -> Bucket:
    seconds = sorted(step["seconds"] for step in steps)
    return Bucket(
        rows=name,
        steps=len(steps),
        tokens=sum(step["tokens"] for step in steps),
        seconds=sum(seconds),
        median=percentile(seconds, 0.5),
        p95=percentile(seconds, 0.95),
        parts=parts_of(steps, STEP_PARTS),
        experts=sum(step.get("cpu_experts", 0) for step in steps),
        expert_bytes=sum(step.get("cpu_bytes", 0) for step in steps),
        expert_seconds=sum(step.get("cpu_seconds", 0.0) for step in steps),
        **{
            name: sum(step.get(name, 0) for step in steps)
            for name in ("bus_bytes", "uses", "gpu_uses", "gpu_experts", "fetched_bytes")
        },
        bandwidth=bandwidth,
    )


def parts_of(lines: Iterable[Mapping[str, float]], names: Sequence[str]) -> list[Part]:
    """The parts with these names of all lines. Shares are of their sum."""
    columns = {name: sorted(line[name] for line in lines if name in line) for name in names}
    whole = sum(map(sum, columns.values())) or 1.0
    return [
        Part(name, percentile(values, 0.5), percentile(values, 0.95), sum(values) / whole)
        for name, values in columns.items()
    ]


def request_parts(requests: Iterable[RequestTimes]) -> list[Part]:
    """The parts of requests, each with the sum over its tokens."""
    return parts_of([times.parts for times in requests], REQUEST_PARTS)
