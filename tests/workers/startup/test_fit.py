"""`fit` says whether a model runs here and with which settings. Flags that the user gave are not changed."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

from ktqueue.core.config import EngineConfig
from ktqueue.core.errors import CheckpointError
from ktqueue.loading import load
from ktqueue.loading.model_report import ModelReport
from ktqueue.workers.startup.build import build, check_context, report_of, resolve_max_model_len
from ktqueue.workers.startup.fit import Fit, choose_settings
from ktqueue.workers.startup.gpu_memory import plan_before_loading
from ktqueue.workers.startup.machine import Gpu, MachineResources, detect_resources

GIB = 1 << 30
LARGE = "synthetic:qwen3-30b-a3b:q4_k_m"


class Reports:
    """Makes the report of each model only once."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], ModelReport] = {}

    def __call__(self, config: EngineConfig) -> ModelReport:
        key = (config.model, config.device, config.rules)
        if key not in self._made:
            self._made[key] = report_of(config)
        check_context(config, self._made[key].facts.max_position_embeddings)
        return self._made[key]


@pytest.fixture(scope="module")
def reports() -> Iterator[Reports]:
    """Reports of checkpoints that are opened once: making 1.5 GB of random weights takes more than the reports do."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(load, "open_checkpoint", lru_cache(1)(load.open_checkpoint))
        yield Reports()


def machine(host: float, gpu: float = 0, others: float = 0) -> MachineResources:
    """A machine with `host` GiB of free memory and a GPU of `gpu` GiB. Other processes use `others` GiB of it."""
    device = Gpu(name="GPU", total=int(gpu * GIB), free=int((gpu - others) * GIB), bus=50e9) if gpu else None
    return MachineResources(
        cpu="CPU", cores=8, host_available=int(host * GIB), gpu=device, no_gpu="" if gpu else "no driver"
    )


def ask(reports: Reports, where: MachineResources, device: str | None = None, model: str = LARGE, **given: Any) -> Fit:
    return choose_settings(EngineConfig(model=model, **given), where, reports, device=device, fixed=list(given))


@pytest.mark.long
def test_chosen_settings_fit_in_the_memory(reports: Reports) -> None:
    """The plan that a worker makes from the chosen settings must have room for the context."""
    experts = -1
    for size in (6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 80, 141):
        found = ask(reports, machine(64, size))
        assert found.fits and found.config.device == "cuda"
        assert sum(found.gpu.values()) <= 0.9 * size * GIB and sum(found.host.values()) <= 64 * GIB
        plan = plan_before_loading(reports(found.config), found.config, size * GIB)
        resolve_max_model_len(found.config, 32_768, plan.pages)
        assert found.config.max_model_len is not None and found.config.max_model_len >= 2_048
        if found.config.rules != "quantised" and found.config.rows == 32:
            assert found.config.gpu_expert_memory_bytes >= experts
            experts = found.config.gpu_expert_memory_bytes
    assert experts >= 16 * GIB and found.notes == ("All experts are on the GPU.",)


def test_dense_weights_stay_quantised_if_all_experts_fit_then(reports: Reports) -> None:
    rules = {size: ask(reports, machine(64, size)).config.rules for size in (24, 30, 31, 34)}
    assert rules[24] is None and rules[34] == "both"
    assert "quantised" in rules.values()


@pytest.mark.long
def test_dense_weights_are_held_twice_if_that_costs_little_of_the_cache(reports: Reports) -> None:
    found, once = ask(reports, machine(64, 80)), ask(reports, machine(64, 80), rules=None)
    assert (found.config.rules, once.config.rules) == ("both", None)
    assert 0.7 * GIB < found.gpu["weights"] - once.gpu["weights"] < 0.8 * GIB
    assert 0.9 * once.tokens <= found.tokens < once.tokens and found.gpu["experts"] == once.gpu["experts"]
    floats = ask(reports, machine(64, 80), model=LARGE.replace("q4_k_m", "bf16"))
    assert floats.config.rules is None, "no format is quantised"


def test_memory_of_other_processes_is_not_used(reports: Reports) -> None:
    alone, shared = ask(reports, machine(64, 24)), ask(reports, machine(64, 24, others=8))
    assert sum(shared.gpu.values()) <= sum(alone.gpu.values()) - 7.9 * GIB
    assert 0 < shared.config.gpu_expert_memory_bytes < alone.config.gpu_expert_memory_bytes
    assert "streams the other" in shared.notes[1]


def test_a_model_that_a_gpu_is_too_small_for_runs_on_the_cpu(reports: Reports) -> None:
    found = ask(reports, machine(64, 3))
    assert found.fits and found.config.device == "cpu" and "does not fit the GPU" in found.notes[0]
    forced = ask(reports, machine(64, 3), device="cuda")
    assert not forced.fits and "engine.gpu_memory_utilization 0.9 of 3.0 GiB" in forced.why_not
    absent = ask(reports, machine(64), device="cuda")
    assert not absent.fits and absent.why_not == "no driver"


def test_the_host_must_hold_the_weights(reports: Reports) -> None:
    for where in (machine(16), machine(16, 80)):
        found = ask(reports, where)
        assert not found.fits
        assert sum(found.host.values()) > 16 * GIB and "16.0 GiB are free" in found.why_not
    sizes = [ask(reports, machine(host)) for host in (20, 24, 32, 64, 256)]
    assert all(fit.fits and sum(fit.host.values()) <= fit.host_limit for fit in sizes)
    caches = [fit.host["cache"] for fit in sizes]
    assert caches == sorted(caches) and caches[-1] == 32 * 4096 * 192 << 10
    assert sizes[0].config.rows < 32 == sizes[-1].config.rows and sizes[-1].config.max_num_seqs is None


def test_flags_that_the_user_gave_are_not_changed(reports: Reports) -> None:
    found = ask(reports, machine(64, 24), max_num_seqs=3, max_model_len=20_000, gpu_expert_memory_bytes=GIB)
    assert found.fits
    config = found.config
    assert (config.max_num_seqs, config.max_model_len, config.gpu_expert_memory_bytes) == (3, 20_000, GIB)
    assert ask(reports, machine(64, 24), rules="exact").config.rules == "exact"
    assert not ask(reports, machine(64, 16), gpu_expert_memory_bytes=30 * GIB, device="cuda").fits
    assert ask(reports, machine(64), kv_cache_bytes=GIB).config.kv_cache_bytes == GIB
    assert "must be at least" in ask(reports, machine(64), kv_cache_bytes=GIB, max_model_len=30_000).why_not
    assert "at most 32768" in ask(reports, machine(64), max_model_len=40_000).why_not


def test_a_model_that_cannot_be_loaded_does_not_fit() -> None:
    def refused(config: EngineConfig) -> ModelReport:
        raise CheckpointError("quantised with AWQ")

    found = choose_settings(EngineConfig(), machine(64, 24), refused, device=None, fixed=())
    assert (found.fits, found.why_not, found.notes) == (False, "quantised with AWQ", ())


def test_an_engine_can_be_built_with_the_chosen_settings(reports: Reports) -> None:
    here = detect_resources("cpu")
    assert here.gpu is None and here.cores >= 1
    found = ask(reports, replace(here, host_available=min(here.host_available, 4 * GIB)), model="demo")
    assert found.fits
    built = build(found.config)
    assert built.card.max_model_len == found.config.max_model_len
    assert built.model.kv_layout(16).page_bytes * (built.config.num_pages or 0) <= found.host["cache"]
