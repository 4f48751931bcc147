"""Chooses settings with which a model fits a machine, or says why it does not fit. Pure.

The size of the weights is known. All else is estimated, rather too large; a worker measures it and logs the result.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ktqueue.core.config import EngineConfig
from ktqueue.core.errors import ConfigError, KtqueueError
from ktqueue.core.units import format_bytes
from ktqueue.engine.memory_plan import MemoryPlan, estimate_step, host_cache_bytes
from ktqueue.engine.scheduler import MAX_PROMPT_ROWS
from ktqueue.engine.states import slots_for
from ktqueue.loading.model_report import ModelReport
from ktqueue.workers.startup.gpu_memory import host_memory_before_loading, plan_before_loading
from ktqueue.workers.startup.machine import Gpu, MachineResources

MIB = 1 << 20
PROCESS_BYTES = 1 << 30  # a worker's interpreter and libraries
CUDA_PROCESS_BYTES = 3 << 30  # the same with CUDA's libraries
LEAST_CONTEXT = 2048  # smallest context in tokens, if the model allows it
ROW_CONTEXT = 2048  # cache tokens for each row on a GPU, which come before memory for experts
ONE_CONTEXT = 8192  # smallest cache on a GPU in tokens, if there is room
EXPERT_STEP = 256 * MIB  # GPU memory for experts is a multiple of it
CACHE_RESERVE = 512 * MIB  # possible error of the estimates for a GPU
LEAST_CACHE = 0.9  # part of the cache that is left if dense weights are held twice
CERTAIN_CACHE_SHARE = 0.75  # part of a GPU's estimated cache that a context may rely on
COMPROMISES = ((32, 8192), (16, 4096), (8, 2048), (1, 2048))  # rows and tokens of a step, tried until they fit a GPU

Examine = Callable[[EngineConfig], ModelReport]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Settings for a model on a machine.

    `host` and `gpu`: bytes by purpose. `host_limit` and `gpu_limit`: free bytes. `token_bytes`: cache bytes per token.
    `tokens`: number of tokens that the cache holds. `why_not`: the reason if the model does not fit, else empty.
    `notes`: further sentences for the user.
    """

    config: EngineConfig
    host: dict[str, int]
    host_limit: int
    gpu: dict[str, int] = field(default_factory=dict)
    gpu_limit: int = 0
    token_bytes: int = 0
    tokens: int = 0
    why_not: str = ""
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the model runs with these settings."""
        return not self.why_not


def choose_settings(
    config: EngineConfig, machine: MachineResources, examine: Examine, *, device: str | None, fixed: Sequence[str]
) -> Fit:
    """Choose settings with which the model of `config` runs on `machine`.

    `examine` reports on the model under given settings. `device`: the device to use; None means a GPU if there is one
    and the model fits it, else the CPU. `fixed`: names of settings that must not be changed.
    """
    on_gpu: Fit | None = None
    if device not in (None, "cpu") or (device is None and machine.gpu is not None):
        on_gpu = _on_gpu(replace(config, device=device or "cuda"), machine, examine, fixed)
        if on_gpu.fits or device is not None:
            return on_gpu
    on_cpu = _on_cpu(replace(config, device="cpu"), machine, examine, fixed)
    if on_gpu is not None and on_gpu.why_not != on_cpu.why_not:
        return replace(on_cpu, notes=(f"It does not fit the GPU: {on_gpu.why_not}.", *on_cpu.notes))
    return on_cpu


def _on_cpu(config: EngineConfig, machine: MachineResources, examine: Examine, fixed: Sequence[str]) -> Fit:
    report = _examined(config, examine)
    if isinstance(report, str):
        return Fit(config=config, host={}, host_limit=machine.host_available, why_not=report)
    token, page = report.cache_token_bytes, report.cache_token_bytes * config.page_size
    host = _weights(report, "cpu") | {"step": _step_bytes(report, config), "process": PROCESS_BYTES}
    if report.state_bytes:
        host["states"] = slots_for(config.rows, drafts=config.drafts) * report.state_bytes
    left = machine.host_available - sum(host.values())
    context = min(report.facts.max_position_embeddings, config.max_model_len or report.facts.max_position_embeddings)
    least = token * (config.max_model_len or min(context, LEAST_CONTEXT)) + page
    if config.kv_cache_bytes is not None:
        cache = config.kv_cache_bytes
    else:
        rows = config.rows
        cache = host_cache_bytes(
            max(left, 0),
            token_bytes=token,
            rows=rows,
            context=context,
            asked=config.max_model_len,
            utilization=config.host_memory_utilization,
        )
        cache = -(-max(cache, least) // MIB) * MIB
    tokens = cache // page * config.page_size
    if "max_num_seqs" not in fixed:
        while config.rows > 1 and tokens < config.rows * min(context, LEAST_CONTEXT // 4):
            config = replace(config, max_num_seqs=config.rows // 2)
    chosen = replace(config, kv_cache_bytes=cache, max_model_len=max(1, min(context, tokens)))
    host["cache"] = cache
    why = ""
    if cache > left:
        why = (
            f"it needs {format_bytes(sum(host.values()))} of the host's memory, and "
            f"{format_bytes(machine.host_available)} are free: free some, lower --max-model-len, or take a smaller "
            "quantisation of the model"
        )
    elif cache < least:
        asked = config.max_model_len or context
        why = f"--kv-cache-bytes must be at least {format_bytes(least)} for a context of {asked}"
    return Fit(
        config=chosen, host=host, host_limit=machine.host_available, token_bytes=token, tokens=tokens, why_not=why
    )


def _on_gpu(config: EngineConfig, machine: MachineResources, examine: Examine, fixed: Sequence[str]) -> Fit:
    """The best of decoded dense weights, quantised ones, and both.

    Both, if that costs nothing but a small part of the cache; else the first of decoded and quantised weights that
    leaves room for all experts; else decoded.
    """
    if "rules" in fixed:
        return _placed(config, machine, examine, fixed)
    decoded = _placed(replace(config, rules=None), machine, examine, fixed)
    if decoded.fits and _all_on_gpu(decoded):
        both = _placed(replace(config, rules="both"), machine, examine, fixed)
        return both if _costs_little(both, decoded) else decoded
    quantised = _placed(replace(config, rules="quantised"), machine, examine, fixed)
    better = quantised.fits and (_all_on_gpu(quantised) or not decoded.fits)
    return quantised if better else decoded


def _costs_little(both: Fit, decoded: Fit) -> bool:
    """Whether some dense weights are held twice, and all else stays as it is but for a small part of the cache."""
    one, other = both.config, decoded.config
    same = both.fits and _all_on_gpu(both) and (one.rows, one.step_tokens) == (other.rows, other.step_tokens)
    return same and both.gpu["weights"] > decoded.gpu["weights"] and both.tokens >= LEAST_CACHE * decoded.tokens


def _all_on_gpu(fit: Fit) -> bool:
    return fit.gpu.get("experts", 0) >= fit.host.get("experts", 0)


def _placed(config: EngineConfig, machine: MachineResources, examine: Examine, fixed: Sequence[str]) -> Fit:
    """The settings with the most experts on the GPU, after the cache has its memory."""
    gpu = machine.gpu
    report = _examined(config, examine)
    limit = machine.host_available
    if gpu is None:
        return Fit(config=config, host={}, host_limit=limit, why_not=machine.no_gpu or "there is no GPU")
    if isinstance(report, str):
        return Fit(config=config, host={}, host_limit=limit, gpu_limit=gpu.total, why_not=report)
    best, fault = _best_plan(report, config, gpu, fixed)
    plan, config = best if best is not None else (None, config)
    host = _weights(report, "cpu") | {
        "hand-off": host_memory_before_loading(report, config)["hand-off"],
        "process": CUDA_PROCESS_BYTES,
    }
    fit = Fit(
        config=config,
        host=host,
        host_limit=limit,
        gpu_limit=gpu.free,
        token_bytes=report.cache_token_bytes,
        why_not=fault,
    )
    if plan is None:
        return fit
    tokens = plan.pages * config.page_size
    parts = plan.parts()
    parts.pop("free")
    context = min(report.facts.max_position_embeddings, int(tokens * CERTAIN_CACHE_SHARE))
    why = ""
    if sum(host.values()) > limit:
        why = (
            f"it needs {format_bytes(sum(host.values()))} of the host's memory, and {format_bytes(limit)} are free; "
            "weights stay there also when experts are copied to the GPU"
        )
    return replace(
        fit,
        config=replace(config, max_model_len=config.max_model_len or context),
        gpu=parts,
        tokens=tokens,
        why_not=why,
        notes=_about_experts(report, config, gpu.bus),
    )


def _best_plan(
    report: ModelReport, config: EngineConfig, gpu: Gpu, fixed: Sequence[str]
) -> tuple[tuple[MemoryPlan, EngineConfig] | None, str]:
    """The plan with the most experts among those that leave room for the cache, or None and the reason."""
    longest = report.facts.max_position_embeddings
    fault = ""
    for rows, tokens in COMPROMISES:
        chosen = config
        if "max_num_seqs" not in fixed and rows < chosen.rows:
            chosen = replace(chosen, max_num_seqs=rows)
        if "max_num_batched_tokens" not in fixed and tokens < chosen.step_tokens:
            chosen = replace(chosen, max_num_batched_tokens=max(tokens, chosen.rows))
        context = min(longest, config.max_model_len or longest)
        wanted = max(chosen.rows * min(context, ROW_CONTEXT), config.max_model_len or min(context, ONE_CONTEXT))
        if chosen.rows == 1:
            wanted = config.max_model_len or min(context, LEAST_CONTEXT)

        def planned(experts: int, chosen: EngineConfig = chosen, wanted: int = wanted) -> MemoryPlan:
            part = chosen.gpu_memory_utilization - (gpu.total - gpu.free) / gpu.total
            tried = replace(chosen, gpu_expert_memory_bytes=experts, gpu_memory_utilization=part)
            plan = plan_before_loading(report, tried, gpu.total, decodes=gpu.decodes, warpgroups=gpu.warpgroups)
            if plan.pages * plan.page_bytes < wanted * report.cache_token_bytes + CACHE_RESERVE:
                raise ConfigError(
                    f"weights and workspaces leave room for only {plan.pages * chosen.page_size} tokens of cache"
                )
            return plan

        try:
            experts = _most_expert_bytes(planned, report.movable_bytes, chosen.gpu_expert_memory_bytes, fixed)
        except ConfigError as error:
            fault = fault or error.message
            continue
        return (planned(experts), replace(chosen, gpu_expert_memory_bytes=experts)), ""
    return None, fault


def _most_expert_bytes(planned: Callable[[int], MemoryPlan], movable: int, setting: int, fixed: Sequence[str]) -> int:
    """The most bytes of experts that fit. Raises ConfigError if the fixed setting, or no experts at all, do not fit."""
    if "gpu_expert_memory_bytes" in fixed:
        planned(setting)
        return setting
    low, high = 0, -(-movable // EXPERT_STEP)  # in steps; `low` fits
    try:  # with all of them, nothing is streamed and no steps overlap, which takes memory
        planned(high * EXPERT_STEP)
        return high * EXPERT_STEP
    except ConfigError:
        planned(0)
    while low < high:
        middle = (low + high + 1) // 2
        try:
            planned(middle * EXPERT_STEP)
            low = middle
        except ConfigError:
            high = middle - 1
    return low * EXPERT_STEP


def _about_experts(report: ModelReport, config: EngineConfig, bus: float) -> tuple[str, ...]:
    movable = report.movable_bytes
    if not movable:
        return ()
    placed = min(movable, config.gpu_expert_memory_bytes)
    if placed == movable:
        return ("All experts are on the GPU.",)
    notes = [
        f"{placed / movable:.0%} of the experts are on the GPU; the CPU computes the others from the host's memory."
    ]
    if bus:
        notes.append(
            f"The bus moves {bus / 1e9:.1f} GB/s: each step of a long prompt streams the other "
            f"{format_bytes(movable - placed)} in {(movable - placed) / bus:.1f} s."
        )
    return tuple(notes)


def _examined(config: EngineConfig, examine: Examine) -> ModelReport | str:
    """The report on the model, or why the model cannot be loaded."""
    try:
        report = examine(config)
    except KtqueueError as error:
        return error.message
    return report.refusal or report


def _weights(report: ModelReport, device: str) -> dict[str, int]:
    """Bytes of dense weights and experts on a device."""
    held = {"dense weights": 0, "experts": 0}
    for row in report.rows:
        if row.device == device:
            held["experts" if row.name.endswith(".experts") else "dense weights"] += row.device_bytes
    return held


def _step_bytes(report: ModelReport, config: EngineConfig) -> int:
    rows = min(config.rows, config.step_tokens)
    return estimate_step(
        config.step_tokens,
        min(rows + MAX_PROMPT_ROWS, config.step_tokens),
        hidden=report.hidden,
        vocabulary=report.facts.vocab_size,
        experts_per_token=report.experts_per_token,
    )
