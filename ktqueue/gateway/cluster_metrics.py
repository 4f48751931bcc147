"""Metrics of queues, tenants and workers, read from Redis. Workers have no HTTP port, so every gateway serves them."""

from collections.abc import Iterable, Mapping, Sequence

from ktqueue.broker.batches import BatchLoad, BatchStatus
from ktqueue.broker.jobs import BoundJobs, QueueDepth, TenantLoad
from ktqueue.broker.models import WorkerInfo
from ktqueue.core.model_card import SHORT_DIGEST
from ktqueue.gateway.metrics import Metric, counter, gauge

# Key in a worker's stats, metric name (vLLM's), help text. A counter starts at 0 with each incarnation of a worker.
_GAUGES = (
    ("running", "num_requests_running", "Sequences that a worker runs."),
    ("waiting", "num_requests_waiting", "Sequences that a worker has claimed and not started."),
    ("rows_limit", "rows_limit", "Sequences that a worker can run at once."),
    ("rows_wanted", "rows_wanted", "Rows that batch jobs may fill, as more would not raise the tokens of a second."),
    ("rows_left_out", "rows_left_out", "Batch rows that the last step left out for interactive jobs."),
    ("over_share", "num_requests_over_share", "Interactive sequences that give their rows to other owners."),
    ("free_pages", "kv_cache_free_pages", "Pages of the KV cache that are free."),
    ("total_pages", "kv_cache_total_pages", "Pages of the KV cache."),
    ("experts", "experts", "Routed experts of all layers, of a worker on a GPU."),
    ("experts_on_gpu", "experts_on_gpu", "Routed experts in GPU memory."),
    ("expert_hit_rate", "expert_hit_rate", "Share of recent uses of experts that were in GPU memory, 0 to 1."),
)
_COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens computed."),
    ("generation_tokens", "generation_tokens", "Tokens generated."),
    ("batch_tokens", "batch_tokens", "Tokens generated for batch jobs."),
    ("preemptions", "num_preemptions", "Sequences that lost their row or pages to others."),
    ("prefix_queries", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    ("prefix_hits", "prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    ("steps", "steps", "Steps of the engine."),
    ("replayed_steps", "replayed_steps", "Steps that replayed a captured CUDA graph."),
    ("prepared_steps", "prepared_steps", "Steps that were prepared while the GPU computed the previous one."),
    ("steps_ahead", "steps_ahead", "Prepared steps launched before the tokens of the previous one were read."),
    ("overlapped_steps", "overlapped_steps", "Batch steps during which interactive sequences had steps of their own."),
    ("drafted_tokens", "spec_decode_num_draft_tokens", "Tokens that steps verified ahead."),
    ("accepted_tokens", "spec_decode_num_accepted_tokens", "Drafted tokens that were right."),
    ("out_of_memory", "out_of_memory", "Steps made smaller because the device ran out of memory."),
    ("expert_uses", "expert_uses", "Choices of experts by tokens, if a GPU has some of the experts or copies them."),
    ("expert_uses_on_gpu", "expert_uses_on_gpu", "Choices of experts that were in GPU memory."),
    ("expert_moves", "expert_moves", "Experts that replaced others in GPU memory."),
    ("expert_streamed_bytes", "expert_streamed_bytes", "Bytes of experts that long steps copied to the GPU."),
    ("expert_predictions", "expert_predictions", "Experts that were predicted for a layer."),
    ("expert_prediction_hits", "expert_prediction_hits", "Predicted experts that the layer used."),
)
_PARTS = ("schedule", "forward", "sample", "commit")
_STEPS = ("one", "several")  # tokens


def queue_metrics(depths: Iterable[QueueDepth]) -> list[Metric]:
    """Queued and running jobs by model."""
    queued = gauge("queue_depth", "Jobs queued in the broker.", ("model_name", "job_class"))
    running = gauge("jobs_running", "Jobs held by workers.", ("model_name",))
    callers = gauge("queue_callers", "Callers with queued jobs, who take turns.", ("model_name", "job_class"))
    for depth in depths:
        for job_class, count in depth.callers.items():
            callers.add_metric((depth.model, job_class), count)
        queued.add_metric((depth.model, "interactive"), depth.interactive)
        queued.add_metric((depth.model, "batch"), depth.batch)
        running.add_metric((depth.model,), depth.running)
    return [queued, running, callers]


def bound_metrics(bound: Iterable[BoundJobs]) -> list[Metric]:
    """Jobs that only some workers of their model can run."""
    waiting = gauge("jobs_bound", "Jobs that wait for a worker with a digest.", ("model_name", "digest", "format"))
    for jobs in bound:
        digest = (jobs.digest or "")[:SHORT_DIGEST]
        waiting.add_metric((jobs.model, digest, str(jobs.format)), jobs.interactive + jobs.batch)
    return [waiting]


def batch_metrics(load: BatchLoad) -> list[Metric]:
    """Batches of all tenants that have not ended."""
    batches = gauge("batches", "Batches that have not ended.", ("status",))
    for status in BatchStatus:
        if not status.ended:
            batches.add_metric((status.value,), load.by_status.get(status, 0))
    unowned = gauge("batches_unowned", "Batches that no living control worker runs.", ())
    unowned.add_metric((), load.unowned)
    lines = gauge("batch_lines_left", "Lines of batches that have no record yet.", ())
    lines.add_metric((), load.lines_left)
    seconds = gauge("batch_seconds_left", "Seconds until the batch that needs longest has run, if known.", ())
    if load.seconds_left is not None:
        seconds.add_metric((), load.seconds_left)
    return [batches, unowned, lines, seconds]


def tenant_metrics(loads: Iterable[TenantLoad]) -> list[Metric]:
    """Jobs and bytes of the tenants of the settings."""
    live = gauge("tenant_jobs_live", "Jobs of a tenant that are queued or running.", ("tenant",))
    queued = gauge("tenant_jobs_queued", "Queued jobs of a tenant.", ("tenant",))
    size = gauge("tenant_queued_bytes", "Bytes of a tenant's queued requests.", ("tenant",))
    stored = gauge("tenant_stored_bytes", "Bytes of a tenant's jobs in Redis, ended jobs included.", ("tenant",))
    for load in loads:
        live.add_metric((load.tenant,), load.live)
        queued.add_metric((load.tenant,), load.queued)
        size.add_metric((load.tenant,), load.queued_bytes)
        stored.add_metric((load.tenant,), load.stored_bytes)
    return [live, queued, size, stored]


def worker_metrics(workers: Sequence[WorkerInfo], models: Iterable[str]) -> list[Metric]:
    """Statistics of live workers. Label `worker`: the incarnation's id. `models`: known ones, also without workers."""
    labels = ("model_name", "worker")
    alive = gauge("workers", "Live workers.", ("model_name",))
    for model in sorted({*models, *(worker.model for worker in workers)}):
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
        "expert_fetched_share", "Share of missing experts that short steps fetch, 0 to 1.", (*labels, "tokens")
    )
    held = gauge("rows_held_by", "What keeps batch jobs from more rows: 1 for this reason.", (*labels, "by"))
    seconds = counter("step_seconds", "Wall time of all steps, by part.", (*labels, "part"))
    for worker in workers:
        if worker.stats.get("total_pages"):
            used = 1 - worker.stats.get("free_pages", 0) / worker.stats["total_pages"]
            usage.add_metric((worker.model, worker.worker_id), used)
        if worker.rows_held_by:
            held.add_metric((worker.model, worker.worker_id, worker.rows_held_by), 1)
        for part, value in _known(worker.stats, "{}_seconds", _PARTS):
            seconds.add_metric((worker.model, worker.worker_id, part), value)
        for tokens, value in _known(worker.stats, "expert_fetched_share_{}", _STEPS):
            fetched.add_metric((worker.model, worker.worker_id, tokens), value)
    return [*result, usage, held, fetched, seconds]


def _known(stats: Mapping[str, float], key: str, labels: Sequence[str]) -> Iterable[tuple[str, float]]:
    """The labels whose key is in `stats`, with its value."""
    return ((label, stats[key.format(label)]) for label in labels if key.format(label) in stats)
