"""Prepares a GPU for an engine: plans attention, places experts, measures memory and divides it.

It knows what must be measured in which order. engine/memory_plan.py computes the plan and touches no device.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ktqueue.core.config import EngineConfig
from ktqueue.core.errors import ConfigError
from ktqueue.core.units import format_bytes
from ktqueue.engine.batch import Batch
from ktqueue.engine.draft_model import MOST_OF_A_STEP, DraftSource
from ktqueue.engine.engine_parts import captured_prompts, captured_rows, captured_steps, may_overlap
from ktqueue.engine.gpu.device_model import can_overlap, device_model
from ktqueue.engine.gpu.graph_capture import RepeatedCall
from ktqueue.engine.gpu.graph_runner import GraphRunner
from ktqueue.engine.gpu.prompt_bucket import prompt_buckets_up_to
from ktqueue.engine.memory_plan import (
    CONTEXT_BYTES,
    PLANNER_BYTES,
    SAMPLED_ROWS,
    DeviceUse,
    MemoryPlan,
    estimate_beside,
    estimate_graphs,
    estimate_selection,
    estimate_step,
    plan_memory,
)
from ktqueue.engine.runner import Model
from ktqueue.engine.scheduler import MAX_PROMPT_ROWS, MOST_BESIDE
from ktqueue.engine.states import slots_for
from ktqueue.loading.load import LoadedModel
from ktqueue.loading.model_report import ModelReport
from ktqueue.operators.base import Operator
from ktqueue.operators.gpu.attention.backends import make_planner
from ktqueue.operators.gpu.attention.base import AttentionPlanner
from ktqueue.operators.gpu.attention.expanded import EXPANDED_BYTES
from ktqueue.operators.gpu.experts.decoding import MEMORY_SHARE
from ktqueue.operators.gpu.experts.memory import captured_tokens
from ktqueue.operators.gpu.experts.streaming import AREAS
from ktqueue.operators.gpu.handoff.handoff import pinned_bytes
from ktqueue.operators.gpu.settings import GpuSettings
from ktqueue.operators.kv_cache import KVLayout
from ktqueue.workers.startup.largest_step import draft_batches, largest_batch

log = logging.getLogger(__name__)


class DeviceMemory(Protocol):
    """The memory of one device, in bytes."""

    @property
    def total(self) -> int:
        """All memory of the device."""

    def used(self) -> int:
        """Memory in use by all processes."""

    def reset_peak(self) -> None:
        """Begin to measure a peak."""

    def peak(self) -> int:
        """The largest growth of this process's tensors since `reset_peak`."""


class CudaMemory:
    """The memory of a GPU."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._before = 0

    @property
    def total(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def used(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - self._before


@dataclass(frozen=True, slots=True)
class PreparedGpu:
    """What the engine of a GPU is built from. `cuda_graphs`: whether steps are captured."""

    planner: AttentionPlanner
    plan: MemoryPlan
    cuda_graphs: bool


def prepare_gpu(
    model: LoadedModel, layout: KVLayout, config: EngineConfig, memory: DeviceMemory, draft: DraftSource | None = None
) -> PreparedGpu:
    """Prepare the device of the model, and of what drafts for it, and divide the memory.

    Raises ConfigError with the setting that does not fit.
    """
    sum_exactly()
    planner = planner_of(model, layout, config)
    weights = memory.used()
    settings = GpuSettings(
        max_tokens=config.step_tokens,
        positions=config.max_model_len or model.card_facts.max_position_embeddings,
        expert_memory_bytes=config.gpu_expert_memory_bytes,
        handoff=config.handoff,
        expert_streaming=config.expert_streaming,
        expert_prefetch=config.expert_prefetch,
    )
    try:
        device_model(model.module).prepare_device(settings)
        if draft is not None:
            _prepare_draft(draft, settings, int(device_model(model.module).statistics().get("expert_bytes", 0)))
    except ValueError as error:
        raise ConfigError(f"device {config.device}: {error}", param="engine.device", value=config.device) from error
    except torch.OutOfMemoryError as error:
        raise _too_much("gpu_expert_memory_bytes", config.gpu_expert_memory_bytes, memory) from error
    experts = memory.used() - weights
    rows, captured = min(config.rows, config.step_tokens), captured_rows(config)
    memory.reset_peak()
    try:
        cache = run_largest_step(model, layout, config, planner, draft)
    except torch.OutOfMemoryError as error:
        raise _too_much("max_num_batched_tokens", config.step_tokens, memory) from error
    step = max(0, memory.peak() - cache)
    vocabulary = model.card_facts.vocab_size
    graphs = config.cuda_graphs and can_be_captured(model, planner)
    prompts = captured_prompts(config, model.module, layout)
    overlaps = can_overlap(model.module) and _may_overlap(config, layout)
    beside = _beside_bytes(step, config, vocabulary, planner.workspace_bytes) if overlaps else 0
    others = estimate_selection(captured, vocabulary) + max(0, memory.used() - weights - experts)
    use = DeviceUse(
        weights=weights,
        experts=experts,
        workspaces=step + beside + others,
        graphs=_graph_bytes(config, step, vocabulary, prompts, latents=layout.latent is not None) if graphs else 0,
        states=slots_for(rows, drafts=config.drafts) * layout.state_bytes,
    )
    plan = plan_memory(
        memory.total,
        use,
        utilization=config.gpu_memory_utilization,
        page_bytes=layout.page_bytes + (0 if draft is None else draft.page_bytes),
        cache_bytes=config.kv_cache_bytes,
        num_pages=config.num_pages,
    )
    return PreparedGpu(planner, plan, graphs)


def planner_of(model: LoadedModel, layout: KVLayout, config: EngineConfig) -> AttentionPlanner:
    """Make the attention planner of a model on a device. Raises ConfigError."""
    facts = model.attention
    try:
        return make_planner(
            layout,
            heads=facts.heads,
            scaling=facts.scaling,
            windows=facts.layer_windows,
            sinks=facts.layer_sinks,
            cap=facts.cap,
            chunk=facts.chunk,
            layer_heads=facts.layer_heads,
            device=config.device,
            dtype=model.dtype,
            backend=config.attention_backend,
        )
    except ValueError as error:
        raise ConfigError(
            f"engine.attention_backend {config.attention_backend!r}: {error}",
            param="engine.attention_backend",
            value=config.attention_backend,
        ) from error


def sum_exactly() -> None:
    """Let torch's matrix products on GPUs sum in float32, and multiply float32 without TF32.

    By default torch rounds parts of long sums to bfloat16 or float16 before it adds them.
    """
    torch.set_float32_matmul_precision("highest")  # not TF32
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def _prepare_draft(draft: DraftSource, settings: GpuSettings, own_bytes: int) -> None:
    """Prepare the device for what drafts. Its experts get the memory that the model's own, of `own_bytes`, leave."""
    left = max(0, settings.expert_memory_bytes - own_bytes)
    positions = min(settings.positions, draft.longest)
    device_model(draft.model).prepare_device(
        replace(settings, positions=positions, expert_memory_bytes=left, expert_streaming="off")
    )


def run_largest_step(
    model: LoadedModel,
    layout: KVLayout,
    config: EngineConfig,
    planner: AttentionPlanner,
    draft: DraftSource | None = None,
) -> int:
    """Run the largest step on a GPU, and then the largest passes of what drafts, to compile their kernels and measure
    their memory. Returns the bytes of the caches."""
    batch = largest_batch(model, layout, config)
    kv, vocabulary = batch.step.kv, model.card_facts.vocab_size

    def run(model: Model, batch: Batch, planner: AttentionPlanner) -> None:
        runner = GraphRunner(
            model,
            vocabulary,
            batch.step.kv,
            planner,
            RepeatedCall(),
            device=config.device,
            buckets=[],
            max_pages=batch.step.page_table.shape[1],
        )
        runner.execute(batch)[:SAMPLED_ROWS]
        runner.wait()

    draft_bytes = 0
    if draft is not None:
        draft.keep_hidden(kv.pages, config.device)
    run(model.module, batch, planner)
    if draft is not None:
        for passed in draft_batches(batch, draft, config.device, MOST_OF_A_STEP):
            run(draft.model, passed, draft.planner or planner)
        draft_bytes = kv.pages * draft.page_bytes
        draft.keep_hidden(0, config.device)  # what was kept is not used again
    if share := kv.saturated_share():
        log.warning(
            "keys or values are beyond the range of a float8 cache: in one layer %.2g %% of them saturate. "
            "Answers may suffer; --kv-cache-dtype auto avoids it",
            100 * share,
        )
    device_model(model.module).after_step()
    return kv.pages * layout.page_bytes + kv.slots * layout.state_bytes + draft_bytes


def plan_before_loading(
    report: ModelReport, config: EngineConfig, device_bytes: int, *, decodes: bool = False, warpgroups: bool = False
) -> MemoryPlan:
    """Plan the memory of a GPU with `device_bytes` for a model that is not loaded.

    The size of the weights is known, all else is estimated. decodes: the GPU may decode a layer's experts;
    warpgroups: unless these multiply packed ones.
    Raises ConfigError as plan_memory does.
    """
    rows, tokens = min(config.rows, config.step_tokens), config.step_tokens
    vocabulary = report.facts.vocab_size
    scored = min(rows + MAX_PROMPT_ROWS, tokens)
    step = estimate_step(
        tokens,
        min(scored, SAMPLED_ROWS) if report.position_bytes else scored,  # GpuDecoder gives LogitsInParts
        hidden=report.hidden,
        vocabulary=vocabulary,
        experts_per_token=report.experts_per_token,
    )
    captured = captured_rows(config)
    packed = warpgroups and report.fits_warpgroups
    streams = _hands_over(report, config) and config.expert_streaming != "off"
    overlaps = streams and config.rules != "quantised" and _may_overlap(config, report)
    return plan_memory(
        device_bytes,
        DeviceUse(
            weights=sum(held for device, held in report.device_bytes.items() if device != "cpu"),
            experts=_expert_bytes(report, config) + report.position_bytes * _positions(report, config),
            workspaces=CONTEXT_BYTES
            + step
            + (_beside_bytes(step, config, vocabulary, PLANNER_BYTES) if overlaps else 0)
            + estimate_selection(captured, vocabulary)
            + (_decoded_bytes(report, config, device_bytes) if decodes and not packed else 0),
            graphs=_graph_bytes(
                config, step, vocabulary, _captured_prompts(report, config, device_bytes), latents=report.caches_latents
            ),
            states=slots_for(rows, drafts=config.drafts) * report.state_bytes,
        ),
        utilization=config.gpu_memory_utilization,
        page_bytes=report.cache_token_bytes * config.page_size,
        cache_bytes=config.kv_cache_bytes,
        num_pages=config.num_pages,
    )


def host_memory_before_loading(report: ModelReport, config: EngineConfig) -> dict[str, int]:
    """Host memory that a model on a GPU needs, in bytes: "weights" that stay on the host, and pinned memory of the
    "hand-off" to their experts."""
    hands_over = _hands_over(report, config)
    pinned = pinned_bytes(report.hidden, report.experts_per_token, config.step_tokens) if hands_over else 0
    return {"weights": report.device_bytes.get("cpu", 0), "hand-off": pinned}


def _may_overlap(config: EngineConfig, model: KVLayout | ModelReport) -> bool:
    """Whether steps may overlap, if the model's experts and its dense weights allow it."""
    return may_overlap(config, state_bytes=model.state_bytes, original_length=model.original_length)


def _beside_bytes(step: int, config: EngineConfig, vocabulary: int, planner_bytes: int) -> int:
    """Bytes for steps that overlap the largest, of `step` bytes."""
    tokens, rows = config.step_tokens, min(config.rows, config.step_tokens)
    return estimate_beside(step, tokens, rows, few=MOST_BESIDE, vocabulary=vocabulary, planner_bytes=planner_bytes)


def _graph_bytes(config: EngineConfig, step: int, vocabulary: int, prompts: Sequence[int], *, latents: bool) -> int:
    """Bytes of captured steps, if the largest eager step needs `step` bytes. latents: whether the cache has them."""
    steps, tokens, rows = captured_steps(config), config.step_tokens, captured_rows(config)
    expanded = EXPANDED_BYTES if latents else 0
    return estimate_graphs(steps, step, tokens, rows, vocabulary, prompts=prompts, expanded_bytes=expanded)


def _hands_over(report: ModelReport, config: EngineConfig) -> bool:
    """Whether the CPU computes some of the experts."""
    return _placed_bytes(report, config) < report.movable_bytes


def _captured_prompts(report: ModelReport, config: EngineConfig, device_bytes: int) -> list[int]:
    """Tokens of the steps with prompts that may be captured. GpuDecoder's are, if no expert is on the CPU."""
    captures = config.cuda_graphs and report.position_bytes and not report.state_bytes
    most = min(config.step_tokens, captured_tokens(report.hidden, report.experts_per_token, device_bytes))
    return prompt_buckets_up_to(most) if captures and not _hands_over(report, config) else []


def _placed_bytes(report: ModelReport, config: EngineConfig) -> int:
    """Bytes of the experts that are placed on the GPU."""
    return min(config.gpu_expert_memory_bytes, report.movable_bytes)


def _positions(report: ModelReport, config: EngineConfig) -> int:
    """Rows of the rotary tables."""
    return (config.max_model_len or report.facts.max_position_embeddings) + report.original_length


def _expert_bytes(report: ModelReport, config: EngineConfig) -> int:
    """Bytes of the experts on the GPU, and of the areas for the streamed others, sized for the largest layer."""
    placed = _placed_bytes(report, config)
    if config.expert_streaming == "off" or placed == report.movable_bytes:
        return placed
    return placed + AREAS * max(0, report.movable_layer_bytes - placed // report.layers)


def _decoded_bytes(report: ModelReport, config: EngineConfig, device_bytes: int) -> int:
    """Bytes in which long steps decode a layer's experts."""
    uses = _expert_bytes(report, config) > 0 and report.decoded_layer_bytes <= MEMORY_SHARE * device_bytes
    return report.decoded_layer_bytes if uses else 0


def log_memory(plan: MemoryPlan, graph_bytes: int, page_size: int, memory: DeviceMemory) -> None:
    """Log how the memory is used, after all of it is allocated."""
    real = replace(plan, use=replace(plan.use, graphs=graph_bytes))
    parts = ", ".join(f"{name} {format_bytes(count)}" for name, count in real.parts().items())
    log.info(
        "GPU memory %s: %s; %d pages hold %d tokens; %s used in all",
        format_bytes(plan.device_bytes),
        parts,
        plan.pages,
        plan.pages * page_size,
        format_bytes(memory.used()),
    )


def can_be_captured(model: LoadedModel, planner: AttentionPlanner) -> bool:
    """Whether decode steps can be captured: every operator must allow it, and attention must not read on the host."""
    if planner.backend == "torch":
        log.warning("decode steps are not captured in CUDA graphs, because torch's attention reads lengths on the host")
        return False
    for module in model.module.modules():
        if isinstance(module, Operator) and not module.capturable:
            name = type(module).__name__
            log.warning("decode steps are not captured in CUDA graphs, because %s does not allow it", name)
            return False
    return True


def _too_much(setting: str, value: int, memory: DeviceMemory) -> ConfigError:
    return ConfigError(
        f"engine.{setting} {value} needs more memory than the device has free, of {format_bytes(memory.total)} in all",
        param=f"engine.{setting}",
        limit=memory.total,
        value=value,
    )
