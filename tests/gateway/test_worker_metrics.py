"""Metrics from the statistics of a worker's last heartbeat."""

from ktqueue.broker.models import WorkerInfo
from ktqueue.gateway.cluster_metrics import worker_metrics


def worker(name: str, **stats: float) -> WorkerInfo:
    return WorkerInfo(
        worker_id=name,
        model="tale",
        max_num_seqs=4,
        running=0,
        host="here",
        process="1:2:3",
        started_at=0.0,
        stats=stats,
        lease_left=1.0,
        step_age=None,
    )


def samples(*workers: WorkerInfo) -> dict[tuple[str, tuple[str, ...]], float]:
    """Samples by name and the values of all labels except the model."""
    return {
        (sample.name, tuple(value for key, value in sample.labels.items() if key != "model_name")): sample.value
        for metric in worker_metrics(workers, ["tale"])
        for sample in metric.samples
    }


def test_worker_metrics_have_only_what_workers_report() -> None:
    on_gpu = worker("a", experts=8, expert_fetched_share_one=0.0, expert_fetched_share_several=0.25, steps=3)
    more = {"rows_wanted": 64, "rows_held_by_pages": 1, "batch_tokens": 7}
    found = samples(on_gpu, worker("b", forward_seconds=1.5, free_pages=1, total_pages=4, **more))
    assert found == {
        ("ktqueue:workers", ()): 2,
        ("ktqueue:experts", ("a",)): 8,
        ("ktqueue:expert_fetched_share", ("a", "one")): 0.0,
        ("ktqueue:expert_fetched_share", ("a", "several")): 0.25,
        ("ktqueue:steps_total", ("a",)): 3,
        ("ktqueue:step_seconds_total", ("b", "forward")): 1.5,
        ("ktqueue:rows_wanted", ("b",)): 64,
        ("ktqueue:rows_held_by", ("b", "pages")): 1,
        ("ktqueue:batch_tokens_total", ("b",)): 7,
        ("ktqueue:kv_cache_free_pages", ("b",)): 1,
        ("ktqueue:kv_cache_total_pages", ("b",)): 4,
        ("ktqueue:kv_cache_usage_perc", ("b",)): 0.75,
    }


def test_a_model_without_workers_has_none() -> None:
    """An alarm for too few workers needs the 0: a missing series is not below any number."""
    assert samples() == {("ktqueue:workers", ()): 0}
