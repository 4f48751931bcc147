"""The gateway's own metrics, in a registry of their own (the door to prometheus_client).

Names and buckets are vLLM's with the prefix `ktqueue:`, so that its dashboards need one search and replace.
"""

from collections.abc import Iterable, Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Metric
from prometheus_client.registry import Collector

LATENCY = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
OTHER = "other"  # replaces a name that no worker serves
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counters, gauges and histograms of one gateway process. Label `model_name` is the served name."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self._registry), partial(Gauge, registry=self._registry)
        self.http_requests = counter(
            "ktqueue:http_requests", "HTTP requests answered.", ["method", "handler", "status"]
        )
        self.http_duration = Histogram(
            "ktqueue:http_request_duration_seconds",
            "From the request's headers to the last byte of its answer.",
            ["handler"],
            buckets=LATENCY,
            registry=self._registry,
        )
        self.http_in_progress = gauge("ktqueue:http_requests_in_progress", "HTTP requests being answered.")
        self.connections = gauge("ktqueue:open_connections", "Open TCP connections.")
        self.connections_ended = counter(
            "ktqueue:connections_ended",
            "Connections that the gateway closed because of what their client sent, or did not send or read.",
            ["reason"],
        )
        self.streams = gauge("ktqueue:open_streams", "SSE streams being sent.")
        self.uploads = counter("ktqueue:file_uploads", "Files that were uploaded.")
        self.upload_bytes = counter("ktqueue:file_upload_bytes", "Bytes of these files.")
        self.upload_refusals = counter(
            "ktqueue:file_upload_refusals", "Uploads that were refused, or that their client left.", ["code"]
        )
        self.success = counter(
            "ktqueue:request_success", "Choices that ended normally.", ["model_name", "finished_reason"]
        )
        self._served: set[str] = set()
        self._failures = counter("ktqueue:request_failure", "Requests that ended in an error.", ["model_name", "code"])
        self.tenant_jobs = counter("ktqueue:tenant_jobs", "Jobs accepted from a tenant of the settings.", ["tenant"])
        self.tenant_refusals = counter(
            "ktqueue:tenant_refusals", "Requests refused by a limit of their tenant.", ["tenant", "code"]
        )
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From submission to the first token.", LATENCY
        )
        self.inter_token = self._histogram("inter_token_latency_seconds", "Between events with tokens.", PER_TOKEN)
        self.end_to_end = self._histogram("e2e_request_latency_seconds", "From submission to the last event.", LATENCY)
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self.generation_tokens = self._histogram("request_generation_tokens", "Generated tokens of a request.", TOKENS)

    def serves(self, model: str) -> None:
        """Remember that a worker serves this model, or did recently: no client made up its name."""
        self._served.add(model)

    def failed(self, model: str, code: str) -> None:
        """Count a request that ended in an error. Model names that clients made up share one series."""
        self._failures.labels(model if model in self._served else OTHER, code).inc()

    def first_token_totals(self) -> tuple[float, int]:
        """Seconds to the first token, summed over all requests of this gateway, and the number of these requests."""
        samples = [sample for metric in self.first_token.collect() for sample in metric.samples]
        seconds = sum(sample.value for sample in samples if sample.name.endswith("_sum"))
        return seconds, int(sum(sample.value for sample in samples if sample.name.endswith("_count")))

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(f"ktqueue:{name}", text, ["model_name"], buckets=tuple(buckets), registry=self._registry)

    def exposition(self, snapshot: Iterable[Metric]) -> bytes:
        """All metrics in Prometheus' text format. `snapshot`: the present metrics of queues and workers."""
        return generate_latest(_Exposition(self._registry, list(snapshot)))


class _Exposition(Collector):
    """The registry's metrics, then the snapshot, without the library's `_created` series."""

    def __init__(self, registry: CollectorRegistry, snapshot: list[Metric]) -> None:
        self._registry = registry
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        for metric in (*self._registry.collect(), *self._snapshot):
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


def gauge(name: str, text: str, labels: tuple[str, ...]) -> GaugeMetricFamily:
    """A gauge of a snapshot, without values."""
    return GaugeMetricFamily(f"ktqueue:{name}", text, labels=labels)


def counter(name: str, text: str, labels: tuple[str, ...]) -> CounterMetricFamily:
    """A counter of a snapshot, without values."""
    return CounterMetricFamily(f"ktqueue:{name}", text, labels=labels)
