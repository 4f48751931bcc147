"""Preparing a GPU and dividing its memory, tested on a CPU with made-up figures."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ktqueue.core.config import EngineConfig
from ktqueue.core.errors import ConfigError
from ktqueue.core.settings.engine import AutoOnOff
from ktqueue.engine.memory_plan import CONTEXT_BYTES, PLANNER_BYTES, estimate_selection
from ktqueue.loading.load import LoadedModel, load_model
from ktqueue.loading.model_report import report_model
from ktqueue.operators.gpu.decoder import GpuDecoder
from ktqueue.operators.gpu.handoff.handoff import pinned_bytes
from ktqueue.operators.gpu.settings import GpuSettings
from ktqueue.operators.kv_cache import KVLayout
from ktqueue.workers.startup import gpu_memory
from ktqueue.workers.startup.gpu_memory import host_memory_before_loading, log_memory, plan_before_loading, prepare_gpu

MIB = 1 << 20
CONFIG = EngineConfig(max_num_seqs=3, max_num_batched_tokens=100, gpu_expert_memory_bytes=5 * MIB)


class MadeUpMemory:
    """A GPU's memory. Each step takes `step` bytes; preparing the model takes what the model says."""

    total = 1000 * MIB

    def __init__(self) -> None:
        self.now = 100 * MIB

    def used(self) -> int:
        return self.now

    def reset_peak(self) -> None:
        pass

    def peak(self) -> int:
        return 64 * MIB


class Prepared(torch.nn.Module):
    """A model with parts on the device."""

    def __init__(self, model: torch.nn.Module, prepare: Callable[[GpuSettings], None]) -> None:
        super().__init__()
        self.model, self.prepare_device = model, prepare
        self.shapes: list[tuple[int, int, int]] = []
        self.steps = 0

    def forward(self, **arguments: Any) -> Any:
        step = arguments["step"]
        self.shapes.append((len(step.context_lengths), arguments["input_ids"].shape[1], step.kv.pages))
        return self.model(**arguments)

    def after_step(self) -> None:
        self.steps += 1

    def statistics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return load_model("demo")


def test_memory_is_measured_and_divided(demo: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    memory = MadeUpMemory()
    seen: list[GpuSettings] = []

    def prepare(settings: GpuSettings) -> None:
        seen.append(settings)
        memory.now += 7 * MIB

    wrapped = Prepared(demo.module, prepare)
    layout = demo.kv_layout(16)
    gpu = prepare_gpu(replace(demo, module=wrapped), layout, CONFIG, memory)
    longest = demo.config.max_position_embeddings
    assert seen == [GpuSettings(max_tokens=100, positions=longest, expert_memory_bytes=5 * MIB)]
    assert wrapped.shapes == [(3, 99, 9)] and wrapped.steps == 1
    use, cache = gpu.plan.use, 9 * layout.page_bytes
    assert (use.weights, use.experts) == (100 * MIB, 7 * MIB)
    assert use.workspaces > 64 * MIB - cache and use.graphs == 0
    assert gpu.plan.pages == (900 * MIB - use.total) // layout.page_bytes
    assert not gpu.cuda_graphs, "torch's attention cannot be captured"
    with caplog.at_level(logging.INFO):
        log_memory(gpu.plan, 11 * MIB, 16, memory)
    assert "graphs 11.0 MiB" in caplog.text and f"{gpu.plan.pages} pages" in caplog.text


@pytest.mark.parametrize("loudest", [400.0, 500.0])
def test_keys_beyond_float8_are_noticed(demo: LoadedModel, loudest: float, caplog: pytest.LogCaptureFixture) -> None:
    class Loud(Prepared):
        def forward(self, **arguments: Any) -> Any:
            step = arguments["step"]
            step.kv.write(3, step.slot_mapping[:1], torch.full((1, 2, 64), loudest), torch.zeros(1, 2, 64))
            return SimpleNamespace(logits=torch.zeros(1, len(arguments["logits_to_keep"]), demo.card_facts.vocab_size))

    layout = replace(demo.kv_layout(16), dtype=torch.float8_e4m3fn)
    model = replace(demo, module=Loud(demo.module, lambda settings: None))
    prepare_gpu(model, layout, CONFIG, MadeUpMemory())
    assert ("beyond the range of a float8 cache" in caplog.text) == (loudest > 448)


@pytest.mark.parametrize(
    ("error", "param"),
    [(ValueError("no such way"), "engine.device"), (torch.OutOfMemoryError("no"), "engine.gpu_expert_memory_bytes")],
)
def test_an_error_names_a_model_that_cannot_be_prepared(demo: LoadedModel, error: Exception, param: str) -> None:
    def prepare(settings: GpuSettings) -> None:
        raise error

    model = replace(demo, module=Prepared(demo.module, prepare))
    with pytest.raises(ConfigError) as caught:
        prepare_gpu(model, demo.kv_layout(16), CONFIG, MadeUpMemory())
    assert caught.value.param == param


def test_an_error_names_a_step_that_does_not_fit(demo: LoadedModel) -> None:
    class Large(torch.nn.Module):
        def forward(self, **arguments: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(ConfigError, match="max_num_batched_tokens 100"):
        prepare_gpu(replace(demo, module=Large()), demo.kv_layout(16), CONFIG, MadeUpMemory())


def test_an_error_names_a_missing_attention_backend(demo: LoadedModel) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare_gpu(demo, demo.kv_layout(16), replace(CONFIG, attention_backend="flashinfer"), MadeUpMemory())
    assert caught.value.param == "engine.attention_backend"


def test_attention_facts_describe_the_model(demo: LoadedModel) -> None:
    assert demo.attention.heads == demo.config.num_attention_heads
    assert demo.attention.scaling == pytest.approx(demo.config.head_dim**-0.5)
    assert demo.attention.windows == {0}


def test_memory_can_be_planned_before_loading() -> None:
    config = replace(CONFIG, device="cuda", gpu_memory_utilization=0.5)
    report = report_model("demo", device="cuda", dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn)
    whole = report_model("demo", device="cuda", dtype=torch.bfloat16)
    assert report.cache_token_bytes * 2 == whole.cache_token_bytes
    plan = plan_before_loading(report, config, 80 << 30)
    assert plan.use.weights == sum(held for device, held in report.device_bytes.items() if device != "cpu") > 0
    assert plan.pages == ((40 << 30) - plan.use.total) // (16 * report.cache_token_bytes)
    with pytest.raises(ConfigError) as caught:
        plan_before_loading(report, config, 1 << 30)
    assert caught.value.param == "engine.gpu_memory_utilization"


def test_the_planned_step_does_not_grow_with_rows_beyond_those_sampled_at_once() -> None:
    report = report_model("demo", device="cuda", dtype=torch.bfloat16)
    config = replace(CONFIG, device="cuda", max_num_batched_tokens=8192)
    few, some, many = (
        plan_before_loading(report, replace(config, max_num_seqs=rows), 80 << 30).use for rows in (8, 256, 2048)
    )
    assert few.workspaces < some.workspaces and some == many


@pytest.mark.parametrize("streaming", ["auto", "off"])
@pytest.mark.parametrize("placed", [0, 5 * MIB, 1 << 40])
def test_the_planned_expert_memory_is_what_the_model_takes(placed: int, streaming: AutoOnOff, tmp_path: Path) -> None:
    """With rotary tables, except for the table of places, and the part of an expert that 5 MiB have still room for."""
    rules = tmp_path / "rules.yaml"
    rules.write_text("- match: {class: 'ForCausalLM$'}\n  replace: {op: GpuDecoder}\n")
    decoder = load_model("demo", rules=str(rules)).module
    assert isinstance(decoder, GpuDecoder)
    before = sum(decoder.device_bytes().values())
    settings = GpuSettings(max_tokens=100, positions=9000, expert_memory_bytes=placed, expert_streaming=streaming)
    decoder.prepare_device(settings)
    taken = sum(decoder.device_bytes().values()) - before
    decoder.close()
    config = replace(CONFIG, device="cuda", gpu_expert_memory_bytes=placed, expert_streaming=streaming)
    config = replace(config, max_model_len=9000)
    plan = plan_before_loading(report_model("demo", device="cuda", dtype=torch.bfloat16), config, 80 << 30)
    assert plan.use.experts == pytest.approx(taken, abs=0.2 * MIB)
    tables = 9000 * decoder.facts.layers[0].head_dim * 4
    assert (plan.use.experts == tables) == (placed == 0 and streaming == "off")


@pytest.mark.parametrize("placed", [0, 5 * MIB])
def test_a_plan_counts_decoded_experts_if_the_gpu_decodes(placed: int, tmp_path: Path) -> None:
    """They take what the decoder of a GPU allocates for them; nothing, if no expert is ever there."""
    rules = tmp_path / "rules.yaml"
    rules.write_text("- match: {class: 'ForCausalLM$'}\n  replace: {op: GpuDecoder}\n")
    taken = []
    for first in (None, 64):
        decoder = load_model("demo", rules=str(rules), dtype=torch.bfloat16).module
        assert isinstance(decoder, GpuDecoder)
        decoder.prepare_device(
            GpuSettings(max_tokens=100, expert_memory_bytes=placed, expert_streaming="off", decode_experts_from=first)
        )
        taken.append(sum(decoder.device_bytes().values()))
        decoder.close()
    report = report_model("demo", device="cuda", dtype=torch.bfloat16)
    config = replace(CONFIG, device="cuda", gpu_expert_memory_bytes=placed, expert_streaming="off")
    plans = [plan_before_loading(report, config, 80 << 30, decodes=decodes) for decodes in (False, True)]
    assert plans[1].use.total - plans[0].use.total == taken[1] - taken[0]
    assert (taken[1] > taken[0]) == (placed > 0)
    for fits in (True, False):
        other = replace(report, fits_warpgroups=report.fits_warpgroups and fits)
        plan = plan_before_loading(other, config, 80 << 30, decodes=True, warpgroups=True)
        assert plan.use.total == plans[not fits].use.total


@pytest.mark.parametrize(
    ("settings", "counted"),
    [
        ({}, True),
        ({"interactive_share": 0.0}, False),
        ({"interactive_step_ms": 0.0}, False),
        ({"expert_streaming": "off"}, False),
        ({"gpu_expert_memory_bytes": 1 << 40}, False),
    ],
    ids=str,
)
def test_memory_for_overlapping_steps_is_planned_where_they_overlap(
    settings: dict[str, Any], counted: bool, tmp_path: Path
) -> None:
    """The step beside the overlapped one has as many tokens as the largest, and the planner of a CPU has no memory."""
    rules = tmp_path / "rules.yaml"
    rules.write_text("- match: {class: 'ForCausalLM$'}\n  replace: {op: GpuDecoder}\n")
    shared = replace(CONFIG, device="cuda", **settings | {"interactive_share": 0.0})
    overlapping = replace(CONFIG, device="cuda", **settings)
    report = report_model("demo", device="cuda", dtype=torch.bfloat16)
    before = [plan_before_loading(report, config, 80 << 30).use.workspaces for config in (shared, overlapping)]
    measured = []
    for config in (shared, overlapping):
        model = load_model("demo", rules=str(rules))
        asked = replace(config, device="cpu")
        measured.append(prepare_gpu(model, model.kv_layout(16), asked, MadeUpMemory()).plan.use.workspaces)
        assert isinstance(model.module, GpuDecoder)
        model.module.close()
    logits = 4 * 3 * report.facts.vocab_size
    assert (measured[1] > measured[0], before[1] > before[0]) == (counted, counted)
    if counted:
        assert measured[1] - measured[0] == 64 * MIB - 9 * model.kv_layout(16).page_bytes + logits
        assert before[1] - before[0] > PLANNER_BYTES + logits


@pytest.mark.parametrize(("placed", "handed_over"), [(0, True), (5 * MIB, True), (1 << 40, False)])
def test_host_memory_counts_weights_and_the_hand_off(placed: int, handed_over: bool) -> None:
    """There is a hand-off if the CPU computes any expert."""
    report = report_model("demo", device="cuda", dtype=torch.bfloat16)
    config = replace(CONFIG, device="cuda", gpu_expert_memory_bytes=placed)
    assert host_memory_before_loading(report, config) == {
        "weights": report.device_bytes["cpu"],
        "hand-off": handed_over * pinned_bytes(256, 4, 100),
    }


@pytest.mark.parametrize(
    ("settings", "prompts", "mebibytes"),
    [
        ({}, False, 3 * 16),  # steps of 1, 2 and 3 rows
        ({"gpu_expert_memory_bytes": 1 << 40}, True, 3 * 16 + 3 * 36),  # and of prompts, of 32, 64 and 100 tokens
        ({"cuda_graphs": False}, False, 0),
    ],
)
def test_the_planned_graphs_are_those_that_will_be_captured(
    settings: dict[str, Any], prompts: bool, mebibytes: int
) -> None:
    config = replace(CONFIG, device="cuda", **settings)
    report = report_model("demo", device="cuda", dtype=torch.bfloat16)
    plan = plan_before_loading(report, config, 80 << 30)
    own = plan.use.graphs
    if prompts:  # the largest step of all is captured
        own -= plan.use.workspaces - CONTEXT_BYTES - estimate_selection(3, report.facts.vocab_size)
    assert 0 <= own - mebibytes * MIB < 16 * MIB
    with_latents = plan_before_loading(replace(report, caches_latents=True), config, 80 << 30)
    assert with_latents.use.graphs - plan.use.graphs == 256 * MIB * prompts


def test_the_planned_graphs_of_a_prepared_model_have_memory_for_expanded_latents(
    demo: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent(Prepared):
        """It says nothing about any step, and keeps no keys."""

        most_captured_tokens = 100

        def forward(self, **arguments: Any) -> Any:
            return SimpleNamespace(logits=torch.zeros(1, len(arguments["logits_to_keep"]), demo.card_facts.vocab_size))

    monkeypatch.setattr(gpu_memory, "can_be_captured", lambda *_: True)
    model = replace(demo, module=Silent(demo.module, lambda settings: None))
    layout = KVLayout(layers=1, kv_heads=1, head_dim=24, page_size=16, dtype=torch.float32, latent=16)
    planned = [
        prepare_gpu(model, layout, replace(CONFIG, cuda_graphs=graphs), MadeUpMemory()).plan.use.graphs
        for layout, graphs in ((replace(layout, latent=None, head_dim=12), True), (layout, True), (layout, False))
    ]
    assert planned[1] - planned[0] == 256 * MIB and planned[2] == 0
