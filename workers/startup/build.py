"""Builds an engine from settings: it loads the model, plans the memory, and creates the engine and the model card.

Errors in the settings are found here, before the worker claims a job. Knows no Redis.
"""

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch

from ktqueue.answers.families import REASONING, TOOLS, reasoning_parser_named, tool_parser_named
from ktqueue.core.config import EngineConfig
from ktqueue.core.errors import ConfigError
from ktqueue.core.model_card import ModelCard
from ktqueue.core.settings.engine import LEAST_AUTO_ROWS, Dtype
from ktqueue.core.units import format_bytes
from ktqueue.engine.draft_model import DraftSource
from ktqueue.engine.engine import Engine
from ktqueue.engine.gpu.device_model import OverlappingModel
from ktqueue.engine.memory_plan import auto_rows, host_cache_bytes
from ktqueue.engine.states import SLOTS_PER_ROW, slots_for
from ktqueue.loading.identity import ModelFiles, digest_settings
from ktqueue.loading.load import LoadedModel, load_prepared, prepare
from ktqueue.loading.model_path import on_this_machine
from ktqueue.loading.model_report import ModelReport, report_model
from ktqueue.loading.sampling_defaults import sampling_defaults
from ktqueue.loading.tokenizer.tokenizer import Tokenizer, load_served_tokenizer
from ktqueue.operators import native
from ktqueue.operators.kv_cache import KVLayout
from ktqueue.operators.named_ranges import name_layers, nvtx_range
from ktqueue.operators.rotary import original_length
from ktqueue.workers.startup.device import check_device_is_here, check_device_name
from ktqueue.workers.startup.draft_model import (
    check_draft_model,
    load_draft_model,
    next_token_source,
    report_with_drafts,
)
from ktqueue.workers.startup.gpu_memory import CudaMemory, log_memory, prepare_gpu
from ktqueue.workers.startup.host_memory import available_memory
from ktqueue.workers.startup.largest_step import run_on_host
from ktqueue.workers.startup.routing_file import prepare_routing
from ktqueue.workers.startup.step_probes import probe_drafts, probe_steps

Progress = Callable[[int, int, str], None]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GPU_SPIN_MICROSECONDS = 2000
MAX_NAMES = 16  # of one model
log = logging.getLogger(__name__)

SPLIT_PART = re.compile(r"-\d{5}-of-\d{5}$")  # model-00001-of-00003.gguf


@dataclass(frozen=True, slots=True)
class Built:
    """What a worker needs to serve a model. In `config` the engine's settings that were None have values."""

    engine: Engine
    tokenizer: Tokenizer
    card: ModelCard
    model: LoadedModel
    config: EngineConfig


def build(
    config: EngineConfig,
    progress: Progress | None = None,
    captured: Progress | None = None,
    *,
    named_ranges: bool = False,
) -> Built:
    """Load the model and build its engine.

    `progress(done, total, what)` is called while weights are loaded, in bytes. `captured` is called in the same way
    while steps are captured on a GPU, in steps. `named_ranges`: a GPU's layers get ranges of NVTX.

    Raises ConfigError, CheckpointError or RuleError, which name the setting, file or tensor at fault.
    """
    _check(config)
    config = on_this_machine(config, log.info)
    config = replace(config, threads=set_threads(config))
    native.set_batch_invariant(not config.on_gpu if config.batch_invariant is None else config.batch_invariant)
    dtype = compute_dtype(config)
    prepared = prepare(config.model, rules=config.rules, device=config.device, dtype=dtype)
    if prepared.refusal is not None:
        raise prepared.refusal
    tokenizer = load_served_tokenizer(config.model, config.tokenizer, prepared.vocab_size)  # weights take minutes
    _warn_of_tokens(tokenizer)
    draft: DraftSource | None = load_draft_model(config, tokenizer, dtype, cache_dtype(config, dtype))
    with ModelFiles(config.model, config.tokenizer) as files:
        try:
            model = load_prepared(prepared, progress)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"the dense weights of {config.model} in {dtype} need more memory than {config.device} has left: "
                f"{error}",
                param="engine.device",
                value=config.device,
            ) from error
        if named_ranges and config.on_gpu:
            name_layers(model.module, nvtx_range)
        prepare_routing(config, model)
        if config.speculation == "mtp":
            draft = next_token_source(config, model, cache_dtype(config, dtype))
        built = assemble(config, model, tokenizer, captured, draft)
        settings = digest_settings(
            model.plan,
            dtype=str(dtype),
            kv_cache_dtype=str(cache_dtype(config, dtype)),
            packages=model.packages,
            original_length=original_length(model.config),
            cache_scales=model.kv_layout(config.page_size, cache_dtype(config, dtype)).scales,
        )
        return replace(built, card=replace(built.card, digest=files.digest(settings)))


def _warn_of_tokens(tokenizer: Tokenizer) -> None:
    if tokenizer.largest_id >= tokenizer.size:
        log.warning(
            "the tokenizer has token ids to %d, but the model only to %d: requests with the others are refused",
            tokenizer.largest_id,
            tokenizer.size - 1,
        )
    if not tokenizer.eos_token_ids:
        log.warning("the tokenizer names no token of the model that ends an answer: answers end at their max_tokens")


def report_of(config: EngineConfig) -> ModelReport:
    """Report what `build` would load with these settings, without reading weights. What drafts is part of it.

    Raises the errors of `loading.model_report`, and ConfigError for drafts that are impossible, or for a context that
    is too long for the model.
    """
    dtype = compute_dtype(config)
    report = report_model(
        config.model,
        rules=config.rules,
        tokenizer=config.tokenizer,
        device=config.device,
        dtype=dtype,
        cache_dtype=cache_dtype(config, dtype),
    )
    check_context(config, report.facts.max_position_embeddings)
    return report_with_drafts(report, config, dtype, cache_dtype(config, dtype))


def assemble(
    config: EngineConfig,
    model: LoadedModel,
    tokenizer: Tokenizer,
    captured: Progress | None = None,
    draft: DraftSource | None = None,
) -> Built:
    """Build the engine of a loaded model. Raises ConfigError.

    It may be called again with other settings once the earlier engine is closed.
    """
    dtype = compute_dtype(config)
    layout = model.kv_layout(config.page_size, cache_dtype(config, dtype))
    gpu = None
    memory = CudaMemory(config.device) if config.on_gpu else None
    free = memory.total if memory else available_memory()
    auto = config.max_num_seqs is None
    if auto:
        rows = auto_rows(
            free,
            step_tokens=config.step_tokens,
            vocabulary=model.card_facts.vocab_size,
            row_state_bytes=SLOTS_PER_ROW * layout.state_bytes,
            in_parts=config.on_gpu and isinstance(model.module, OverlappingModel),
        )
        config = replace(config, max_num_seqs=rows)
    if memory:
        gpu = prepare_gpu(model, layout, config, memory, draft)
    else:
        run_on_host(model, layout, config)
    longest = model.card_facts.max_position_embeddings
    if gpu:
        num_pages = gpu.plan.pages
    else:
        free = available_memory() - slots_for(config.rows, drafts=config.drafts) * layout.state_bytes
        rows = max(LEAST_AUTO_ROWS, config.rows // 4) if auto else config.rows
        num_pages = resolve_num_pages(config, layout, longest, free, rows, draft.page_bytes if draft else 0)
    max_model_len = resolve_max_model_len(config, longest, num_pages)
    resolved = replace(
        config,
        served_model_name=config.served_model_name or (served_name(config.model),),
        dtype=cast(Dtype, str(dtype).removeprefix("torch.")),
        num_pages=num_pages,
        max_model_len=max_model_len,
        cuda_graphs=gpu.cuda_graphs if gpu else config.cuda_graphs,
    )
    try:
        engine = Engine(
            model.module,
            tokenizer,
            layout,
            resolved,
            num_pages,
            max_model_len,
            planner=gpu.planner if gpu else None,
            progress=captured,
            auto_rows=auto,
            draft=draft,
        )
    except OSError as error:  # of the system, for the memory of the cache
        size = format_bytes(num_pages * layout.page_bytes)
        raise ConfigError.must_be("engine.kv_cache_bytes", "memory that this host can give", size) from error
    if auto:
        probe_steps(engine, model.card_facts.vocab_size, resolved.step_tokens if resolved.on_gpu else 0)
    if resolved.drafts:
        probe_drafts(engine, model.card_facts.vocab_size, resolved.max_draft_tokens)
    if gpu and memory:
        log_memory(gpu.plan, engine.graph_bytes, config.page_size, memory)
    card = ModelCard(
        name=resolved.served_model_name[0],
        aliases=resolved.served_model_name[1:],
        created=int(time.time()),
        max_model_len=max_model_len,
        vocab_size=model.card_facts.vocab_size,
        architecture=model.card_facts.architecture,
        quantization=model.card_facts.quantization,
        max_num_seqs=config.rows,
        longest_token=tokenizer.longest_token,
        tool_parser=tool_parser_named(config.tool_call_parser, tokenizer.chat_template or ""),
        reasoning_parser=reasoning_parser_named(config.reasoning_parser, tokenizer.chat_template or ""),
        force_thinking=config.force_think,
        sampling_defaults=sampling_defaults(config.model) if config.generation_config == "auto" else {},
    )
    return Built(engine, tokenizer, card, model, resolved)


def set_threads(config: EngineConfig) -> int:
    """Start the kernel threads. Returns their number.

    A worker on a GPU leaves one CPU to Python's thread, which launches steps and waits for them, because the hand-off's
    thread calls the kernels. There the kernel threads spin during the GPU's part of a layer, since a sleeping thread
    wakes microseconds late.
    """
    if not config.on_gpu:
        return native.set_threads(config.threads, pin=config.pin_threads)
    count = config.threads or max(1, native.default_threads() - 1)
    return native.set_threads(count, pin=config.pin_threads, spin_microseconds=GPU_SPIN_MICROSECONDS)


def served_name(model: str) -> str:
    """The model's name for clients if none is set: that of its file or folder, without suffix and part number."""
    path = Path(model)
    return SPLIT_PART.sub("", path.stem if path.suffix == ".gguf" else path.resolve().name) or model


def resolve_num_pages(
    config: EngineConfig, layout: KVLayout, longest: int, available: int, rows: int, draft_bytes: int = 0
) -> int:
    """Number of pages of a cache on the CPU: the setting, else a number that suits the model and the host.

    `longest`: the longest context of the model in tokens. `available`: free memory in bytes. `rows`: of long sequences.
    `draft_bytes`: of a page in the cache of the draft model, which is in the same memory.
    Raises ConfigError if not even one page fits.
    """
    if config.num_pages is not None:
        return config.num_pages
    size, page_bytes = config.kv_cache_bytes, layout.page_bytes + draft_bytes
    if size is None:
        size = host_cache_bytes(
            available,
            token_bytes=-(-page_bytes // layout.page_size),
            rows=rows,
            context=min(longest, config.max_model_len or longest),
            asked=config.max_model_len,
            utilization=config.host_memory_utilization,
        )
        log.info("the cache may use %s of %s free memory", format_bytes(size), format_bytes(available))
    elif size > available:
        log.warning("the cache of %s is larger than the free memory of %s", format_bytes(size), format_bytes(available))
    if size < page_bytes:
        raise ConfigError(
            f"engine.kv_cache_bytes must hold at least one page of {format_bytes(page_bytes)} "
            f"({layout.page_size} tokens), got {format_bytes(size)}",
            param="engine.kv_cache_bytes",
            limit=page_bytes,
            value=size,
        )
    return size // page_bytes


def resolve_max_model_len(config: EngineConfig, longest: int, num_pages: int) -> int:
    """The longest context in tokens: the setting, else the largest that the model and the pages allow.

    Raises ConfigError if the setting is larger than that.
    """
    capacity = num_pages * config.page_size
    asked = config.max_model_len
    if asked is None:
        return min(longest, capacity)
    check_context(config, longest)
    if asked > capacity:
        raise ConfigError(
            f"engine.max_model_len {asked} does not fit the cache: {num_pages} pages of {config.page_size} tokens hold "
            f"{capacity}; raise engine.kv_cache_bytes (or engine.num_pages) or lower engine.max_model_len",
            param="engine.max_model_len",
            limit=capacity,
            value=asked,
        )
    return asked


def check_context(config: EngineConfig, longest: int) -> None:
    """Raise ConfigError if the context is longer than `longest`, the model's longest context in tokens."""
    asked = config.max_model_len
    if asked is not None and asked > longest:
        raise ConfigError.must_be(
            "engine.max_model_len", f"at most {longest}, the model's longest context", asked, limit=longest
        )


def compute_dtype(config: EngineConfig) -> torch.dtype:
    """The type of dense weights and activations."""
    if config.dtype == "auto":
        return torch.bfloat16 if config.on_gpu else torch.float32
    return DTYPES[config.dtype]


def cache_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """The cache's dtype for a model that computes in `dtype`."""
    return torch.float8_e4m3fn if config.kv_cache_dtype == "fp8" else dtype


def check_choices(config: EngineConfig) -> None:
    """Check what does not depend on this machine. Raises ConfigError."""
    check_device_name(config.device)
    if not config.on_gpu and config.kv_cache_dtype == "fp8":
        raise ConfigError.must_be(
            "engine.kv_cache_dtype", f"auto on device {config.device}", config.kv_cache_dtype, limit="auto"
        )
    if not config.on_gpu and config.gpu_expert_memory_bytes:
        log.warning("engine.gpu_expert_memory_bytes has no effect without engine.device cuda")


def _check(config: EngineConfig) -> None:
    if config.max_num_seqs is not None and config.step_tokens < config.max_num_seqs:
        # Each running row needs a token of every step's budget.
        wanted = f"at least engine.max_num_seqs ({config.max_num_seqs})"
        key = "engine.max_num_batched_tokens"
        raise ConfigError.must_be(key, wanted, config.step_tokens, limit=config.max_num_seqs)
    check_choices(config)
    check_draft_model(config)
    names = config.served_model_name
    if len(names) > MAX_NAMES or len(set(names)) < len(names) or not all(0 < len(name) <= 256 for name in names):
        wanted = f"at most {MAX_NAMES} different names of 1 to 256 characters"
        raise ConfigError.must_be("engine.served_model_name", wanted, ",".join(names), limit=MAX_NAMES)
    _check_parsers(config)
    try:
        native.isa()
    except ValueError as error:
        raise ConfigError(str(error), param="KTQUEUE_ISA") from error
    check_device_is_here(config.device)


def _check_parsers(config: EngineConfig) -> None:
    try:
        tool_parser_named(config.tool_call_parser, "")
    except KeyError:
        wanted = f"auto, none, {', '.join(TOOLS)}"
        raise ConfigError.must_be("engine.tool_call_parser", wanted, config.tool_call_parser, limit="auto") from None
    try:
        reasoning_parser_named(config.reasoning_parser, "")
    except KeyError:
        wanted = f"auto, none, {', '.join(REASONING)}"
        raise ConfigError.must_be("engine.reasoning_parser", wanted, config.reasoning_parser, limit="auto") from None
