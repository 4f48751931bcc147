"""The figures of a run, under the names of `vllm bench serve`: latencies, throughput, goodput, failures by kind."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from ktqueue.bench.serving.answer import StreamedAnswer
from ktqueue.bench.serving.distribution import Distribution
from ktqueue.bench.serving.http_client import RequestFailure

METRICS = ("ttft", "tpot", "itl", "e2el", "client_queue_time")
"""First token, time for each token after it, gap between chunks, end to end, wait in this client before sending."""
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
MAX_KINDS = 50  # of failures; further ones are counted together


class Figures:
    """Counts what a run measures, in bounded memory. `goodput`: limits in seconds by metric."""

    def __init__(self, goodput: Mapping[str, float] | None = None) -> None:
        self.goodput = dict(goodput or {})
        self.times = {metric: Distribution() for metric in METRICS}
        self.completed = self.good = self.interrupted = 0
        self.prompt_tokens = self.output_tokens = 0
        self.without_usage = 0  # completed requests whose tokens the server did not count
        self.failures: Counter[str] = Counter()
        self.messages: dict[str, str] = {}  # the first one of each kind of failure
        self.seconds = 0.0  # from the first request to the last answer
        self.cpu_seconds = 0.0  # that this process used meanwhile
        self.max_concurrent = 0
        self._running = 0
        self._tokens_of_second: defaultdict[int, float] = defaultdict(float)

    @property
    def failed(self) -> int:
        """Number of failed requests."""
        return self.failures.total()

    @property
    def ended(self) -> int:
        """Number of requests that completed or failed."""
        return self.completed + self.failed

    def begin(self) -> None:
        """Note that a request was sent."""
        self._running += 1
        self.max_concurrent = max(self.max_concurrent, self._running)

    def fail(self, failure: RequestFailure) -> None:
        """Count a failed request."""
        self._running -= 1
        kind = failure.kind if failure.kind in self.failures or len(self.failures) < MAX_KINDS else "other"
        self.failures[kind] += 1
        self.messages.setdefault(kind, failure.message)

    def interrupt(self) -> None:
        """Count a request that was running when the run was interrupted."""
        self._running -= 1
        self.interrupted += 1

    def complete(self, answer: StreamedAnswer, planned_tokens: int, waited: float, began: float) -> None:
        """Count a complete answer. `waited` seconds passed in this client, in a run that began at `began`."""
        assert answer.first_at is not None
        self._running -= 1
        self.completed += 1
        self.without_usage += answer.completion_tokens is None
        tokens = answer.output_tokens
        self.output_tokens += tokens
        self.prompt_tokens += planned_tokens if answer.prompt_tokens is None else answer.prompt_tokens
        ttft, e2el = answer.first_at - answer.sent_at, answer.ended_at - answer.sent_at
        tpot = (e2el - ttft) / (tokens - 1) if tokens > 1 else 0.0
        measured = {"ttft": ttft, "tpot": tpot, "e2el": e2el}
        self.good += all(measured[metric] <= limit for metric, limit in self.goodput.items())
        self.times["ttft"].add(ttft)
        self.times["e2el"].add(e2el)
        self.times["client_queue_time"].add(waited)
        if tokens > 1:
            self.times["tpot"].add(tpot)
        self.times["itl"].extend(answer.gaps)
        of_chunk = tokens / answer.chunks  # a chunk may have several tokens
        for seconds in accumulate(answer.gaps, initial=answer.first_at - began):
            self._tokens_of_second[int(seconds)] += of_chunk

    @property
    def output_throughput(self) -> float:
        """Output tokens a second of completed requests."""
        return self.output_tokens / self.seconds if self.seconds else 0.0

    def report(self, metrics: Sequence[str], percentiles: Sequence[float]) -> dict[str, Any]:
        """The figures as JSON values. Times are in ms, None where nothing was measured."""
        seconds = self.seconds or math.inf
        found: dict[str, Any] = {
            "duration": self.seconds,
            "completed": self.completed,
            "failed": self.failed,
            "interrupted": self.interrupted,
            "total_input_tokens": self.prompt_tokens,
            "total_output_tokens": self.output_tokens,
            "request_throughput": self.completed / seconds,
            "request_goodput": self.good / seconds if self.goodput else None,
            "output_throughput": self.output_tokens / seconds,
            "total_token_throughput": (self.prompt_tokens + self.output_tokens) / seconds,
            "max_output_tokens_per_s": round(max(self._tokens_of_second.values(), default=0.0), 3),
            "max_concurrent_requests": self.max_concurrent,
        }
        for metric in metrics:
            times = self.times[metric]
            found[f"mean_{metric}_ms"] = _ms(times.mean)
            found[f"median_{metric}_ms"] = _ms(times.percentile(50))
            found[f"std_{metric}_ms"] = _ms(times.deviation)
            for percent in percentiles:
                found[f"p{percent:g}_{metric}_ms"] = _ms(times.percentile(percent))
        found["failures"] = {
            kind: {"count": count, "message": self.messages[kind]} for kind, count in self.failures.most_common()
        }
        found["requests_without_usage"] = self.without_usage
        found["client_cpu"] = self.cpu_seconds / seconds
        return found


def _ms(seconds: float) -> float | None:
    return None if math.isnan(seconds) else seconds * 1e3
