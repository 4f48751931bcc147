"""What Redis tells of queues and workers, as metrics. Workers have no HTTP port: a gateway speaks for them."""

from collections.abc import Iterable, Mapping, Sequence

from ktqueue.broker.jobs import BoundJobs, QueueDepth, TenantLoad
from ktqueue.broker.models import WorkerInfo
from ktqueue.core.model_card import SHORT_DIGEST
from ktqueue.gateway.metrics import Metric, counter, gauge

# Key of a worker's stats, vLLM's metric name, what it is. Counters grow as long as one incarnation lives.
_GAUGES = (
    ("running", "num_requests_running", "Sequences that a worker runs."),
    ("waiting", "num_requests_waiting", "Sequences that a worker has claimed and not begun."),
    ("free_pages", "kv_cache_free_pages", "Pages of the KV cache that are free."),
    ("total_pages", "kv_cache_total_pages", "Pages of the KV cache."),
    ("experts", "experts", "Routed experts of all layers, of a worker on a GPU."),
    ("experts_on_gpu", "experts_on_gpu", "Routed experts in GPU memory."),
    ("expert_hit_rate", "expert_hit_rate", "Share of late uses of experts that found theirs in GPU memory, 0 to 1."),
)
_COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens computed."),
    ("generation_tokens", "generation_tokens", "Tokens generated."),
    ("preemptions", "num_preemptions", "Sequences preempted for want of pages."),
    ("prefix_queries", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    ("prefix_hits", "prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    ("steps", "steps", "Steps of the engine."),
    ("replayed_steps", "replayed_steps", "Steps that replayed a captured CUDA graph."),
    ("prepared_steps", "prepared_steps", "Steps that were prepared while the GPU was at the one before."),
    ("out_of_memory", "out_of_memory", "Steps made smaller because the device had no memory for them."),
    ("expert_moves", "expert_moves", "Experts that came into GPU memory for others."),
    ("expert_streamed_bytes", "expert_streamed_bytes", "Bytes of experts that long steps copied to the GPU."),
    ("expert_predictions", "expert_predictions", "Experts that a layer would probably use."),
    ("expert_prediction_hits", "expert_prediction_hits", "Those of them that it used."),
)
_PARTS = ("schedule", "forward", "sample", "commit")
_STEPS = ("one", "several")  # tokens


def queue_metrics(depths: Iterable[QueueDepth]) -> list[Metric]:
    """What waits in Redis and what runs, by model."""
    queued = gauge("queue_depth", "Jobs queued in the broker.", ("model_name", "job_class"))
    running = gauge("jobs_running", "Jobs held by workers.", ("model_name",))
    for depth in depths:
        queued.add_metric((depth.model, "interactive"), depth.interactive)
        queued.add_metric((depth.model, "batch"), depth.batch)
        running.add_metric((depth.model,), depth.running)
    return [queued, running]


def bound_metrics(bound: Iterable[BoundJobs]) -> list[Metric]:
    """What waits for some workers of its model alone."""
    waiting = gauge("jobs_bound", "Jobs that wait for a worker with a digest.", ("model_name", "digest", "format"))
    for one in bound:
        digest = (one.digest or "")[:SHORT_DIGEST]
        waiting.add_metric((one.model, digest, str(one.format)), one.interactive + one.batch)
    return [waiting]


def tenant_metrics(loads: Iterable[TenantLoad]) -> list[Metric]:
    """What tenants of the settings have in work."""
    live = gauge("tenant_jobs_live", "Jobs of a tenant that wait or run.", ("tenant",))
    queued = gauge("tenant_jobs_queued", "Jobs of a tenant that wait.", ("tenant",))
    size = gauge("tenant_queued_bytes", "Bytes of a tenant's requests that wait.", ("tenant",))
    stored = gauge("tenant_stored_bytes", "Bytes that a tenant's jobs hold in Redis, ended ones too.", ("tenant",))
    for load in loads:
        live.add_metric((load.tenant,), load.live)
        queued.add_metric((load.tenant,), load.queued)
        size.add_metric((load.tenant,), load.queued_bytes)
        stored.add_metric((load.tenant,), load.stored_bytes)
    return [live, queued, size, stored]


def worker_metrics(workers: Sequence[WorkerInfo]) -> list[Metric]:
    """What live workers say of themselves. Label `worker`: the incarnation's id."""
    labels = ("model_name", "worker")
    alive = gauge("workers", "Live workers.", ("model_name",))
    for model in sorted({worker.model for worker in workers}):
        alive.add_metric((model,), sum(worker.model == model for worker in workers))
    result: list[Metric] = [alive]
    for family, table in ((gauge, _GAUGES), (counter, _COUNTERS)):
        for key, name, text in table:
            metric = family(name, text, labels)
            for worker in workers:
                if key in worker.stats:
                    metric.add_metric((worker.model, worker.worker_id), worker.stats[key])
            result.append(metric)
    usage = gauge("kv_cache_usage_perc", "Share of the KV cache's pages in use, 0 to 1.", labels)
    fetched = gauge(
        "expert_fetched_share", "Share of absent experts that come to short steps, 0 to 1.", (*labels, "tokens")
    )
    seconds = counter("step_seconds", "Wall time of all steps, by part.", (*labels, "part"))
    for worker in workers:
        if worker.stats.get("total_pages"):
            used = 1 - worker.stats.get("free_pages", 0) / worker.stats["total_pages"]
            usage.add_metric((worker.model, worker.worker_id), used)
        for part, value in _known(worker.stats, "{}_seconds", _PARTS):
            seconds.add_metric((worker.model, worker.worker_id, part), value)
        for tokens, value in _known(worker.stats, "expert_fetched_share_{}", _STEPS):
            fetched.add_metric((worker.model, worker.worker_id, tokens), value)
    return [*result, usage, fetched, seconds]


def _known(stats: Mapping[str, float], key: str, labels: Sequence[str]) -> Iterable[tuple[str, float]]:
    """Those of `labels` whose key the worker tells, and what it says."""
    return ((label, stats[key.format(label)]) for label in labels if key.format(label) in stats)
