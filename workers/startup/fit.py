"""Will a model run on a machine, and with which settings? Pure: adds up a model's report and a machine's memory.

All but the weights is estimated, on the generous side; a worker measures, and says in its log what it found.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ktqueue.core.config import EngineConfig
from ktqueue.core.errors import ConfigError, KtqueueError
from ktqueue.core.units import format_bytes
from ktqueue.engine.memory_plan import MemoryPlan, estimate_step, host_cache_bytes
from ktqueue.loading.inspect import ModelReport
from ktqueue.workers.startup.gpu_memory import host_memory_before_loading, plan_before_loading
from ktqueue.workers.startup.machine import Machine

MIB = 1 << 20
PROCESS_BYTES = 1 << 30  # of a worker's interpreter and libraries
CUDA_PROCESS_BYTES = 3 << 30  # with CUDA's
LEAST_CONTEXT = 2048  # tokens that one sequence must be able to have, if the model can
ROW_CONTEXT = 2048  # tokens of the cache for each row of a GPU, before its memory is given to experts
ONE_CONTEXT = 8192  # tokens of the cache at least, where there is room
EXPERT_STEP = 256 * MIB  # in which GPU memory for experts is chosen
CACHE_RESERVE = 512 * MIB  # by which estimates of a GPU may be wrong
SURE_OF_CACHE = 0.75  # the part of a GPU's estimated cache that a context may rely on
COMPROMISES = ((32, 8192), (16, 4096), (8, 2048), (1, 2048))  # rows and tokens of a step, until they fit a GPU

Examine = Callable[[EngineConfig], ModelReport]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The answer. `config`: the settings chosen. `host` and `gpu`: bytes by what they are for; `host_limit` and
    `gpu_limit`: bytes that are there for them. `token_bytes`: of the cache, for a token; `tokens`: that it holds.
    `why_not`: empty if it fits. `notes`: what else there is to know, a sentence each."""

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


def fit(config: EngineConfig, machine: Machine, examine: Examine, *, device: str | None, fixed: Sequence[str]) -> Fit:
    """The settings with which the model of `config` runs on `machine`, or why it does not.

    examine: gives the report of the model under settings. device: that must be taken; None: a GPU if there is one and
    the model fits it, else the CPU. fixed: names of settings that are not to be changed.
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


def _on_cpu(config: EngineConfig, machine: Machine, examine: Examine, fixed: Sequence[str]) -> Fit:
    report = _examined(config, examine)
    if isinstance(report, str):
        return Fit(config=config, host={}, host_limit=machine.host_available, why_not=report)
    token, page = report.cache_token_bytes, report.cache_token_bytes * config.page_size
    host = _weights(report, "cpu") | {"step": _step_bytes(report, config), "process": PROCESS_BYTES}
    left = machine.host_available - sum(host.values())
    context = min(report.facts.max_position_embeddings, config.max_model_len or report.facts.max_position_embeddings)
    least = token * (config.max_model_len or min(context, LEAST_CONTEXT)) + page
    if config.kv_cache_bytes is not None:
        cache = config.kv_cache_bytes
    else:
        rows = config.max_num_seqs
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
        while config.max_num_seqs > 1 and tokens < config.max_num_seqs * min(context, LEAST_CONTEXT // 4):
            config = replace(config, max_num_seqs=config.max_num_seqs // 2)
    chosen = replace(config, kv_cache_bytes=cache, max_model_len=max(1, min(context, tokens)))
    host["cache"] = cache
    why = ""
    if cache > left:
        why = (
            f"it needs {format_bytes(sum(host.values()))} of the host's memory, {format_bytes(machine.host_available)} "
            "are free: free some, lower --max-model-len, or take a smaller quantisation of the model"
        )
    elif cache < least:
        asked = config.max_model_len or context
        why = f"--kv-cache-bytes must be at least {format_bytes(least)} for a context of {asked}"
    return Fit(
        config=chosen,
        host=host,
        host_limit=machine.host_available,
        token_bytes=token,
        tokens=tokens,
        why_not=why,
    )


def _on_gpu(config: EngineConfig, machine: Machine, examine: Examine, fixed: Sequence[str]) -> Fit:
    """The best of dense weights decoded and as stored: those that leave room for all experts, else decoded ones."""
    fits = []
    for rules in (config.rules,) if "rules" in fixed else (None, "quantised"):
        one = _placed(replace(config, rules=rules), machine, examine, fixed)
        fits.append(one)
        if one.fits and not one.config.rules and _all_on_gpu(one):
            break
    good = [one for one in fits if one.fits]
    return next((one for one in good if _all_on_gpu(one)), good[0] if good else fits[0])


def _all_on_gpu(one: Fit) -> bool:
    return one.gpu.get("experts", 0) >= one.host.get("experts", 0)


def _placed(config: EngineConfig, machine: Machine, examine: Examine, fixed: Sequence[str]) -> Fit:
    """The settings with most experts on the GPU, the cache first."""
    gpu = machine.gpu
    report = _examined(config, examine)
    limit = machine.host_available
    if gpu is None:
        return Fit(config=config, host={}, host_limit=limit, why_not=machine.no_gpu or "there is no GPU")
    if isinstance(report, str):
        return Fit(config=config, host={}, host_limit=limit, gpu_limit=gpu.total, why_not=report)
    best, fault = _best_plan(report, config, gpu.total, gpu.total - gpu.free, fixed)
    plan, config = best if best is not None else (None, config)
    host = _weights(report, "cpu") | {
        "hand-off": host_memory_before_loading(report, config)["hand-off"],
        "process": CUDA_PROCESS_BYTES,
    }
    found = Fit(
        config=config,
        host=host,
        host_limit=limit,
        gpu_limit=gpu.free,
        token_bytes=report.cache_token_bytes,
        why_not=fault,
    )
    if plan is None:
        return found
    tokens = plan.pages * config.page_size
    parts = plan.parts()
    parts.pop("free")
    context = min(report.facts.max_position_embeddings, int(tokens * SURE_OF_CACHE))
    why = ""
    if sum(host.values()) > limit:
        why = (
            f"it needs {format_bytes(sum(host.values()))} of the host's memory, {format_bytes(limit)} are free: "
            "weights stay there, too, when experts are copied to the GPU"
        )
    return replace(
        found,
        config=replace(config, max_model_len=config.max_model_len or context),
        gpu=parts,
        tokens=tokens,
        why_not=why,
        notes=_about_experts(report, config, gpu.bus),
    )


def _best_plan(
    report: ModelReport, config: EngineConfig, total: int, others: int, fixed: Sequence[str]
) -> tuple[tuple[MemoryPlan, EngineConfig] | None, str]:
    """The plan with most experts among those that leave room for the cache, and why there is none.

    others: bytes of the GPU that other processes have.
    """
    longest = report.facts.max_position_embeddings
    fault = ""
    for rows, tokens in COMPROMISES:
        chosen = config
        if "max_num_seqs" not in fixed:
            chosen = replace(chosen, max_num_seqs=rows)
        if "max_num_batched_tokens" not in fixed and tokens < chosen.step_tokens:
            chosen = replace(chosen, max_num_batched_tokens=max(tokens, chosen.max_num_seqs))
        context = min(longest, config.max_model_len or longest)
        wanted = max(chosen.max_num_seqs * min(context, ROW_CONTEXT), config.max_model_len or min(context, ONE_CONTEXT))
        if chosen.max_num_seqs == 1:
            wanted = config.max_model_len or min(context, LEAST_CONTEXT)

        def planned(experts: int, chosen: EngineConfig = chosen, wanted: int = wanted) -> MemoryPlan:
            part = chosen.gpu_memory_utilization - others / total
            tried = replace(chosen, gpu_expert_memory_bytes=experts, gpu_memory_utilization=part)
            plan = plan_before_loading(report, tried, total)
            if plan.pages * plan.page_bytes < wanted * report.cache_token_bytes + CACHE_RESERVE:
                raise ConfigError(f"weights and workspaces leave {plan.pages * chosen.page_size} tokens of cache")
            return plan

        try:
            experts = _most(planned, report.movable_bytes, chosen.gpu_expert_memory_bytes, fixed)
        except ConfigError as error:
            fault = fault or error.message
            continue
        return (planned(experts), replace(chosen, gpu_expert_memory_bytes=experts)), ""
    return None, fault


def _most(planned: Callable[[int], MemoryPlan], movable: int, given: int, fixed: Sequence[str]) -> int:
    """Bytes of experts that fit. Raises ConfigError where not even none do, or not those that are given."""
    if "gpu_expert_memory_bytes" in fixed:
        planned(given)
        return given
    planned(0)
    low, high = 0, -(-movable // EXPERT_STEP)  # in steps; low fits
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
        f"{placed / movable:.0%} of the experts are on the GPU; the CPU computes the others, from the host's memory."
    ]
    if bus:
        notes.append(
            f"The bus moves {bus / 1e9:.1f} GB/s: a long prompt streams the other {format_bytes(movable - placed)} in "
            f"{(movable - placed) / bus:.1f} s a step."
        )
    return tuple(notes)


def _examined(config: EngineConfig, examine: Examine) -> ModelReport | str:
    """The report, or why the model cannot be loaded."""
    try:
        report = examine(config)
    except KtqueueError as error:
        return error.message
    return report.refusal or report


def _weights(report: ModelReport, device: str) -> dict[str, int]:
    """Bytes of weights on a device, dense ones and experts."""
    held = {"dense weights": 0, "experts": 0}
    for row in report.rows:
        if row.device == device:
            held["experts" if row.name.endswith(".experts") else "dense weights"] += row.device_bytes
    return held


def _step_bytes(report: ModelReport, config: EngineConfig) -> int:
    rows = min(config.max_num_seqs, config.step_tokens)
    return estimate_step(
        config.step_tokens,
        rows,
        hidden=report.hidden,
        vocabulary=report.facts.vocab_size,
        experts_per_token=report.experts_per_token,
    )
