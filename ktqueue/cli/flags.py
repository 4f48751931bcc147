"""The flags that several verbs share, and how flags, environment and file become one Config.

A verb takes a group of flags as one parameter; `expand` shows its fields to typer one by one. The
fields are named as in core.config, so that a group is also the overrides of its section.
"""

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from ktqueue.core.config import BrokerConfig, Config, EngineConfig, GatewayConfig, load_config

_BROKER, _ENGINE, _GATEWAY = BrokerConfig(), EngineConfig(), GatewayConfig()

AsJson = Annotated[bool, typer.Option("--json", help="Write JSON for machines.")]
ModelName = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        help="A .gguf file, a Hugging Face folder, hf:OWNER/NAME[:QUANT], or demo.",
        show_default=False,
    ),
]


def _option(*names: str, say: str, default: Any = None, metavar: str | None = None, panel: str) -> Any:
    shown = str(default) if default is not None else False
    return typer.Option(*names, help=say, show_default=shown, metavar=metavar, rich_help_panel=panel)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonFlags:
    """Where the settings and Redis are."""

    config: Annotated[
        Path | None,
        _option("--config", say="Settings; KTQUEUE_* and flags win over them.", metavar="FILE.toml", panel="Settings"),
    ] = None
    url: Annotated[
        str | None,
        _option(
            "--redis-url",
            say="Redis to use.",
            default="KTQUEUE_BROKER_URL, else that of `ktqueue up` in the state directory",
            metavar="URL",
            panel="Settings",
        ),
    ] = None
    state_dir: Annotated[
        str | None,
        _option(
            "--state-dir",
            say="Folder of the private Redis.",
            default=_BROKER.state_dir,
            metavar="DIR",
            panel="Settings",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """The model and the engine that runs it."""

    model: Annotated[
        str | None,
        _option(
            "--model",
            "-m",
            say="A .gguf file, a Hugging Face folder, hf:OWNER/NAME[:QUANT], or demo (built in).",
            default=_ENGINE.model,
            metavar="MODEL",
            panel="Engine",
        ),
    ] = None
    served_model_name: Annotated[
        str | None,
        _option("--served-model-name", say="Name that clients ask for.", metavar="NAME", panel="Engine"),
    ] = None
    rules: Annotated[
        str | None,
        _option(
            "--rules",
            say="Rules that replace modules: a YAML file, or a shipped one by name.",
            default="default",
            metavar="NAME|FILE",
            panel="Engine",
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        _option("--tokenizer", say="Folder of another tokenizer.", metavar="DIR", panel="Engine"),
    ] = None
    device: Annotated[str | None, _option("--device", say="cpu or cuda.", default=_ENGINE.device, panel="Engine")] = (
        None
    )
    dtype: Annotated[
        str | None,
        _option("--dtype", say="auto, float32, bfloat16 or float16.", default=_ENGINE.dtype, panel="Engine"),
    ] = None
    threads: Annotated[
        int | None, _option("--threads", say="CPU threads.", default="the cores", metavar="N", panel="Engine")
    ] = None
    pin_threads: Annotated[
        str | None,
        _option(
            "--pin-threads", say="Keep CPU threads on their cores: auto, on or off.", default="auto", panel="Engine"
        ),
    ] = None
    batch_invariant: Annotated[
        bool | None,
        _option(
            "--batch-invariant/--no-batch-invariant",
            say="Compute a token alike in every batch; without it AMX reads prompts faster.",
            default="on a CPU",
            panel="Engine",
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        _option("--max-model-len", say="Context in tokens.", default="the model's", metavar="N", panel="Engine"),
    ] = None
    max_num_seqs: Annotated[
        int | None,
        _option(
            "--max-num-seqs",
            say="Sequences that run at once.",
            default=_ENGINE.max_num_seqs,
            metavar="N",
            panel="Engine",
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        _option(
            "--max-num-batched-tokens",
            say="Tokens of one step.",
            default="512, on a GPU 8192",
            metavar="N",
            panel="Engine",
        ),
    ] = None
    page_size: Annotated[
        int | None,
        _option("--page-size", say="Tokens of a cache page.", default=_ENGINE.page_size, metavar="N", panel="Engine"),
    ] = None
    kv_cache_bytes: Annotated[
        str | None,
        _option(
            "--kv-cache-bytes",
            say="Size of the cache.",
            default="from the free memory; what is left of a GPU",
            metavar="SIZE",
            panel="Engine",
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str | None,
        _option(
            "--kv-cache-dtype",
            say="Type of the cache on a GPU: auto (as computed) or fp8.",
            default=_ENGINE.kv_cache_dtype,
            panel="Engine",
        ),
    ] = None
    enable_prefix_caching: Annotated[
        bool | None,
        _option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            say="Reuse the pages of equal prefixes.",
            default="on",
            panel="Engine",
        ),
    ] = None
    host_memory_utilization: Annotated[
        float | None,
        _option(
            "--host-memory-utilization",
            say="Part of the host's free memory that the cache may take.",
            default=_ENGINE.host_memory_utilization,
            metavar="PART",
            panel="Engine",
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        _option(
            "--gpu-memory-utilization",
            say="Part of the GPU's memory to fill.",
            default=_ENGINE.gpu_memory_utilization,
            metavar="PART",
            panel="GPU",
        ),
    ] = None
    gpu_expert_memory_bytes: Annotated[
        str | None,
        _option("--gpu-expert-memory", say="GPU memory for experts.", default="0", metavar="SIZE", panel="GPU"),
    ] = None
    attention_backend: Annotated[
        str | None,
        _option(
            "--attention-backend",
            say="auto, flashinfer, triton or torch.",
            default=_ENGINE.attention_backend,
            panel="GPU",
        ),
    ] = None
    cuda_graphs: Annotated[
        bool | None,
        _option("--cuda-graphs/--no-cuda-graphs", say="Replay decode steps as graphs.", default="on", panel="GPU"),
    ] = None
    handoff: Annotated[
        str | None,
        _option(
            "--handoff",
            say="How tokens reach the CPU's experts: auto, flags or host_functions.",
            default=_ENGINE.handoff,
            panel="GPU",
        ),
    ] = None
    expert_streaming: Annotated[
        str | None,
        _option(
            "--expert-streaming",
            say="Copy experts to the GPU for a step: auto, on or off.",
            default=_ENGINE.expert_streaming,
            panel="GPU",
        ),
    ] = None
    expert_prefetch: Annotated[
        bool | None,
        _option(
            "--expert-prefetch/--no-expert-prefetch",
            say="Let the CPU fetch experts of the next layer while the GPU works.",
            default="on",
            panel="GPU",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayFlags:
    """The HTTP front."""

    host: Annotated[
        str | None,
        _option("--host", say="Address to listen on.", default=_GATEWAY.host, metavar="ADDRESS", panel="Gateway"),
    ] = None
    port: Annotated[
        int | None, _option("--port", say="Port to listen on.", default=_GATEWAY.port, metavar="N", panel="Gateway")
    ] = None
    api_keys: Annotated[
        str | None,
        _option(
            "--api-key-hash",
            say="SHA-256 of a key that clients must send (see ktqueue keys new); several with commas.",
            default="none asked",
            metavar="HASH",
            panel="Gateway",
        ),
    ] = None


def settings(common: CommonFlags, *, engine: EngineFlags | None = None, gateway: GatewayFlags | None = None) -> Config:
    """The Config of this process: defaults, file, environment, flags. Raises ConfigError."""
    overrides: dict[str, dict[str, Any]] = {"broker": {"url": common.url, "state_dir": common.state_dir}}
    if engine is not None:
        overrides["engine"] = asdict(engine)
    if gateway is not None:
        overrides["gateway"] = asdict(gateway)
    return load_config(common.config, os.environ, overrides)


def expand(verb: Callable[..., None]) -> Callable[..., None]:
    """Let typer see the fields of each flag group that `verb` takes as a parameter."""
    hints = get_type_hints(verb, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(verb).parameters.items():
        kind = hints[name]
        if name not in groups:
            parameters.append(parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        shown = get_type_hints(kind, include_extras=True)
        parameters += [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=shown[f.name])
            for f in fields(kind)
        ]

    @functools.wraps(verb)
    def wrapper(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{f.name: given.pop(f.name) for f in fields(kind)})
        verb(**given)

    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    del wrapper.__wrapped__
    return wrapper
