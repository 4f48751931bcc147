"""What one client of the kill loop saw of its job, compared with the journal and an undisturbed run. It does no I/O."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ktqueue.core.events import JobState, TokenEvent

WORDS = ("king", "queen", "wolf", "forest", "bread", "gold", "river", "night", "door", "mother", "giant", "hill", "fox")
STEPS_AFTER_CANCEL = 8  # steps that run or wait for their commit when a cancel is acknowledged


@dataclass(frozen=True)
class FixedRequest:
    """A request with a fixed output: greedy, or sampled with a seed. It never ends before `max_tokens`."""

    prompt: str
    sampling: Mapping[str, Any] = field(hash=False)

    @property
    def choices(self) -> int:
        """Number of choices."""
        return int(self.sampling.get("n", 1))

    def body(self, tokens: int, job_class: str = "interactive") -> dict[str, Any]:
        """The body of POST /v1/jobs."""
        sampling = {**self.sampling, "max_tokens": tokens, "ignore_eos": True}
        return {"model": "demo", "prompt": self.prompt, "sampling": sampling, "job_class": job_class}


def requests(count: int) -> list[FixedRequest]:
    """Return `count` different requests: half greedy, half sampled, some of them with two choices."""
    made = []
    for number in range(count):
        words = " ".join(WORDS[(number * 5 + i * (number % 7 + 1)) % len(WORDS)] for i in range(4 + number % 23))
        prompt = f"FixedRequest {number}: {words}. Once upon a time there was a {WORDS[number % len(WORDS)]} who"
        sampled = {"temperature": 0.9, "top_p": 0.95, "seed": number, **({"n": 2} if number % 4 == 3 else {})}
        made.append(FixedRequest(prompt, sampled if number % 2 else {"temperature": 0.0}))
    return made


@dataclass
class ReaderView:
    """The events of one reader over all its connections. `faults` counts what no reader may see."""

    events: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # seconds of the monotonic clock, one for each event
    connection: list[int] = field(default_factory=list)  # which connection each event came over
    faults: Counter[str] = field(default_factory=Counter)

    @property
    def last_seq(self) -> int:
        """The number of the last event; 0 before the first."""
        return int(self.events[-1]["seq"]) if self.events else 0

    @property
    def state(self) -> str | None:
        """The final state of the job; None until the reader has seen its end."""
        return self.events[-1].get("state") if self.events else None

    def add(self, event: dict[str, Any], arrival: float, connection: int) -> None:
        """Record an event that arrived at `arrival`, in seconds of the monotonic clock."""
        if event["seq"] <= self.last_seq:
            self.faults["duplicated tokens"] += 1
            return
        if event["seq"] > self.last_seq + 1:
            self.faults["skipped tokens"] += 1
        if self.state is not None:
            self.faults["events after the last one"] += 1
        self.events.append(event)
        self.times.append(arrival)
        self.connection.append(connection)


@dataclass
class JobOutcome:
    """One job: its request, and what its client knows. `tail_at_cancel`: last seq when the cancel was acknowledged."""

    job_id: str
    request: FixedRequest
    tokens: int
    job_class: str = "interactive"
    view: ReaderView | None = None
    state: str | None = None
    tail_at_cancel: int | None = None


Reference = Mapping[FixedRequest, Sequence[Sequence[int]]]  # token ids of each choice, as many as the longest job has


def judge(outcome: JobOutcome, journal: Sequence[TokenEvent], reference: Sequence[Sequence[int]]) -> Counter[str]:
    """Count what is wrong with an ended job. `reference`: token ids of its choices in an undisturbed run."""
    faults: Counter[str] = Counter(outcome.view.faults if outcome.view else ())
    if [event.seq for event in journal] != list(range(1, len(journal) + 1)):
        faults["journals with gaps"] += 1
    ends = [event.state for event in journal if event.state is not None]
    if len(ends) != 1 or journal[-1].state is None or ends[0] != outcome.state:
        faults["jobs without exactly one end"] += 1
    ids: list[list[int]] = [[] for _ in reference]
    for event in journal:
        ids[event.index] += event.token_ids
    for got, wanted in zip(ids, reference, strict=True):
        if got != list(wanted[: len(got)]) or len(got) > outcome.tokens:
            faults["forked generations"] += 1
        elif outcome.state == JobState.DONE and len(got) < outcome.tokens:
            faults["skipped tokens"] += 1
    usage = journal[-1].usage if journal else None
    if outcome.state == JobState.DONE and (usage is None or usage.completion_tokens != sum(map(len, ids))):
        faults["wrong counts of tokens"] += 1
    if outcome.view is not None:
        faults += _compare(outcome.view, journal)
    if outcome.tail_at_cancel is not None:
        if outcome.state not in (JobState.CANCELLED, JobState.DONE):
            faults["lost cancels"] += 1
        if len(journal) - outcome.tail_at_cancel > STEPS_AFTER_CANCEL * outcome.request.choices + 1:
            faults["late cancels"] += 1
    elif outcome.state != JobState.DONE:
        faults[f"jobs that are {outcome.state}"] += 1
    return faults


def _compare(view: ReaderView, journal: Sequence[TokenEvent]) -> Counter[str]:
    """Compare a reader with the journal: the whole journal if it saw the end, else a prefix."""
    faults: Counter[str] = Counter()
    if len(view.events) > len(journal) or (view.state is not None and len(view.events) < len(journal)):
        faults["views longer or shorter than the journal"] += 1
    for seen, event in zip(view.events, journal, strict=False):
        same = (seen["seq"], seen["index"], seen.get("text", ""), seen.get("state")) == (
            event.seq, event.index, event.text, event.state,
        )  # fmt: skip
        if not same or tuple(seen.get("token_ids", ())) != event.token_ids:
            faults["events that are not the journal's"] += 1
    return faults
