"""The time of each request, part by part, from the files of workers and gateways.

Each part is measured between two events, and the parts follow one another. `inbound` begins when a gateway has read the
head of the HTTP request, and `outbound` ends when it has sent the answer. Without a gateway's profile both are 0, and
also if lines of tokens are missing, whose time they would hide. `takeover` is the time between two workers, if the
first one died.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from ktqueue.profiling.folder import Line, ProcessProfile
from ktqueue.profiling.records import STEP_PARTS
from ktqueue.profiling.token_log import FIRST_PARTS, LAST_PARTS

REQUEST_PARTS: Final = (
    "inbound", *FIRST_PARTS, "between", *STEP_PARTS, "takeover", *LAST_PARTS, "outbound",
)  # fmt: skip
"""In the order of time, except that tokens repeat `between` and the parts of steps."""


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """One request: the choice that ended last. began, ended: Unix seconds. parts: seconds by name, of REQUEST_PARTS.

    token_ends: Unix seconds of the end of each token's step, in order.
    """

    id: str
    began: float
    ended: float
    tokens: int
    parts: Mapping[str, float]
    token_ends: Sequence[float]

    @property
    def seconds(self) -> float:
        """The sum of its parts."""
        return sum(self.parts.values())


def request_times(processes: Iterable[ProcessProfile]) -> list[RequestTimes]:
    """Every request with tokens, in the order of arrival."""
    choices: dict[tuple[str, int], list[Line]] = {}
    answers: dict[str, Line] = {}
    for process in processes:
        for line in process.tokens:
            choices.setdefault((line["request"], line["choice"]), []).append(line)
        for line in process.requests:
            for request in line["requests"]:
                answers.setdefault(request, line)
    last: dict[str, list[Line]] = {}
    for (request, _), lines in choices.items():
        lines.sort(key=lambda line: (line["at"], line["position"]))
        if request not in last or lines[-1]["at"] > last[request][-1]["at"]:
            last[request] = lines
    found = [_times(request, lines, answers.get(request)) for request, lines in last.items()]
    return sorted((times for times in found if times is not None), key=lambda times: times.began)


def _times(request: str, lines: Sequence[Line], answer: Line | None) -> RequestTimes | None:
    parts = dict.fromkeys(REQUEST_PARTS, 0.0)
    timed = [line for line in lines if "same_step" not in line]
    if not timed:
        return None
    for place, line in enumerate(timed):
        for name in (*FIRST_PARTS, "between", *STEP_PARTS):
            parts[name] += line.get(name, 0.0)
        if place and "arrived" in line:  # of another worker
            parts["takeover"] += line["arrived"] - timed[place - 1]["at"]
    final = timed[-1]
    for name in LAST_PARTS:
        parts[name] = final[name]
    began: float = timed[0]["arrived" if "arrived" in timed[0] else "at"]
    ended = final["at"] + sum(final[name] for name in LAST_PARTS)
    if answer is not None and _has_all(lines):
        parts["inbound"], began = began - answer["at"], answer["at"]
        sent = answer["at"] + answer["seconds"]
        parts["outbound"], ended = sent - ended, sent
    return RequestTimes(request, began, ended, len(lines), parts, [line["at"] for line in lines])


def _has_all(lines: Sequence[Line]) -> bool:
    """Whether no token lacks its line, except those that a worker took to its death."""
    return "arrived" in lines[0] and all(
        "arrived" in later or later["position"] == earlier["position"] + 1 for earlier, later in pairwise(lines)
    )
