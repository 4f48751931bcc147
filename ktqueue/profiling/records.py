"""What profiles record, and its JSON lines. Times are seconds of the monotonic clock until they are written.

In files, times of day are Unix seconds (`at`), so that files of several processes line up. What every step makes is a
named tuple, since a frozen dataclass takes several times as long to make.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ktqueue.core.codec import dumps
from ktqueue.core.expert_work import ExpertUses, ExpertWork

VERSION: Final = 1
STEP_PARTS: Final = ("schedule", "build", "launch", "pages", "sample", "wait", "detokenise", "launch_next")
"""The parts of a step in the order of time. Together they are all of it."""
SECONDS: Final = "%.7f"


def template(forms: Mapping[str, str]) -> bytes:
    """The fields of a JSON object without its braces, to be filled by `%`, which is several times as fast as orjson and
    rounding. `forms`: the format of each field by name."""
    return ",".join(f'"{name}":{form}' for name, form in forms.items()).encode()


_BOOLEANS = (b"false", b"true")
_STEP = b"{" + template(
    {"step": "%d", "at": SECONDS, "seconds": SECONDS}
    | dict.fromkeys(STEP_PARTS, SECONDS)
    | dict.fromkeys(("rows", "sampled", "tokens", "prompt_tokens", "pages_used", "pages_free"), "%d")
    | dict.fromkeys(("replayed", "prepared"), "%s")
)
_EXPERT_FORMS = (
    {"cpu_runs": "%d", "cpu_experts": "%d", "cpu_bytes": "%d", "cpu_seconds": SECONDS}
    | dict.fromkeys(("bus_bytes", "uses", "gpu_uses", "gpu_experts", "fetched_bytes"), "%d")
    | {"cpu_gb_per_second": "%.3f"}
)
EXPERT_FIELDS: Final = tuple(_EXPERT_FORMS)
"""Fields of steps whose model counts the work of experts."""
_EXPERTS = template(_EXPERT_FORMS)


class StepMoments(NamedTuple):
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
        """Seconds of each of STEP_PARTS."""
        return (
            self.planned - self.began,
            self.built - self.planned,
            self.launched - self.built,
            self.committed - self.launched,
            self.sampled - self.committed - self.waited,
            self.waited,
            self.written - self.sampled,
            self.ended - self.written,
        )


class Totals(NamedTuple):
    """Counters of an engine since its start: computed prompt tokens, replayed steps, prepared steps, and the work of
    experts, which is None if the model does not count it."""

    prompt_tokens: int
    replayed: int
    prepared: int
    experts: ExpertWork | None


class StepRecord(NamedTuple):
    """One step. rows: sequences; sampled: rows that got a token; tokens: computed ones. pages: of the cache, of which
    `pages_free` are free. totals: after the step; before: after the step before. Only the writer's thread subtracts
    them, since what the engine's thread does here takes time from each step."""

    number: int
    moments: StepMoments
    rows: int
    sampled: int
    tokens: int
    pages: int
    pages_free: int
    totals: Totals
    before: Totals

    def lines(self, wall: float) -> bytes:
        """Its JSON line. `wall`: Unix seconds minus the monotonic clock."""
        number, moments, rows, sampled, tokens, pages, free, totals, before = self
        text = _STEP % (
            number,
            moments.began + wall,
            moments.ended - moments.began,
            *moments.parts(),
            rows,
            sampled,
            tokens,
            totals.prompt_tokens - before.prompt_tokens,
            pages - free,
            free,
            _BOOLEANS[totals.replayed > before.replayed],
            _BOOLEANS[totals.prepared > before.prepared],
        )
        if totals.experts is None or before.experts is None:
            return text + b"}\n"
        work = totals.experts.since(before.experts)
        rate = work.cpu_bytes / max(work.cpu_seconds, 1e-9) / 1e9
        return b"%s,%s}\n" % (text, _EXPERTS % (*work, rate))


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


def _short(seconds: float) -> float:
    return round(seconds, 7)
