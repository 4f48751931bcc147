"""What profiles record, and its JSON lines. Times are seconds of the monotonic clock until they are written.

In files, times of day are Unix seconds (`at`), so that files of several processes line up.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ktqueue.core.codec import dumps
from ktqueue.core.expert_work import ExpertUses, ExpertWork

VERSION: Final = 1
STEP_PARTS: Final = ("schedule", "build", "launch", "wait", "sample", "detokenise", "commit")
"""The parts of a step. Together they are all of it."""
_DIGITS = 7  # a tenth of a microsecond


@dataclass(frozen=True, slots=True)
class StepMoments:
    """When the parts of one step began, in order.

    began: the plan. planned: the batch's arrays. built: the call of the model, on a CPU the whole forward pass.
    launched: pages are committed. committed: tokens are chosen; `waited` seconds of that the host waited for the
    device. sampled: text, stop strings and outputs. written: the next step may be launched.
    """

    began: float
    planned: float
    built: float
    launched: float
    committed: float
    sampled: float
    written: float
    ended: float
    waited: float

    def parts(self) -> tuple[float, ...]:
        """Seconds of each of STEP_PARTS. `commit` is pages and the launch of the next step."""
        return (
            self.planned - self.began,
            self.built - self.planned,
            self.launched - self.built,
            self.waited,
            self.sampled - self.committed - self.waited,
            self.written - self.sampled,
            self.committed - self.launched + self.ended - self.written,
        )


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step. rows: sequences; sampled: rows that got a token; tokens: computed ones, of which `prompt_tokens` are of
    prompts. replayed: a captured step was replayed. prepared: built while the device computed the step before."""

    number: int
    moments: StepMoments
    rows: int
    sampled: int
    tokens: int
    prompt_tokens: int
    pages_used: int
    pages_free: int
    replayed: bool
    prepared: bool
    experts: ExpertWork | None

    def lines(self, wall: float) -> bytes:
        """Its JSON line. `wall`: Unix seconds minus the monotonic clock."""
        moments, experts = self.moments, self.experts
        value: dict[str, Any] = {
            "step": self.number,
            "at": _short(moments.began + wall),
            "seconds": _short(moments.ended - moments.began),
            **short_parts(STEP_PARTS, moments.parts()),
            "rows": self.rows,
            "sampled": self.sampled,
            "tokens": self.tokens,
            "prompt_tokens": self.prompt_tokens,
            "pages_used": self.pages_used,
            "pages_free": self.pages_free,
            "replayed": self.replayed,
            "prepared": self.prepared,
        }
        if experts is not None:
            value |= experts._asdict()
            value["cpu_seconds"] = _short(experts.cpu_seconds)
            value["cpu_gb_per_second"] = round(experts.cpu_bytes / max(experts.cpu_seconds, 1e-9) / 1e9, 3)
        return dumps(value) + b"\n"


@dataclass(frozen=True, slots=True)
class RoutingRecord:
    """How often each expert was chosen in the `steps` steps up to `at`, and the model's own statistics then."""

    at: float
    steps: int
    uses: ExpertUses
    statistics: Mapping[str, float] = field(default_factory=dict)

    def lines(self, wall: float) -> bytes:
        """Its JSON line."""
        value = {"at": _short(self.at + wall), "steps": self.steps, **self.statistics, "uses": self.uses}
        return dumps(value) + b"\n"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One HTTP request that a gateway answered. began: its head was read; started: the answer's head is being sent;
    ended: the last part is. jobs: ids of its jobs, separated by commas."""

    request_id: str
    jobs: str
    path: str
    status: int
    began: float
    started: float
    ended: float

    def lines(self, wall: float) -> bytes:
        """Its JSON line."""
        value = {
            "at": _short(self.began + wall),
            "seconds": _short(self.ended - self.began),
            "first": _short(self.started - self.began),
            "path": self.path,
            "status": self.status,
            "request_id": self.request_id,
            "requests": self.jobs.split(","),
        }
        return dumps(value) + b"\n"


def short_parts(names: Iterable[str], seconds: Iterable[float]) -> dict[str, float]:
    """Names with their seconds, rounded for a line."""
    return {name: _short(value) for name, value in zip(names, seconds, strict=True)}


def _short(seconds: float) -> float:
    return round(seconds, _DIGITS)
