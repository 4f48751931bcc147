"""A transformers model without weights (the door to transformers): config, module tree on the meta device, what
it shares and what it computes for itself. Knows no file format and no rules."""

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers.initialization import no_init_weights

from ktqueue.core.errors import CheckpointError
from ktqueue.operators import attention

Config = transformers.PretrainedConfig
LATENT = ("deepseek_v2", "deepseek_v3")
"""Model types whose attention LatentAttention computes."""


def build_config(values: Mapping[str, Any], source: str) -> Config:
    """A transformers config from plain values. Raises CheckpointError for an unknown or unusable one."""
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
        raise CheckpointError(
            f"{source}: model_type {model_type!r} is unknown to transformers {transformers.__version__}"
        )
    if values.get("kv_lora_rank") and model_type not in LATENT:
        known = ", ".join(LATENT)
        raise CheckpointError(
            f"{source}: multi-head latent attention of {model_type} is not supported; that of {known} is"
        )
    if values.get("quantization_config"):
        raise CheckpointError(
            f"{source}: checkpoints with a quantization_config are not supported; use F16, BF16 or GGUF"
        )
    try:
        config: Config = transformers.CONFIG_MAPPING[model_type].from_dict(dict(values))
    except Exception as error:  # each config class validates in its own way
        raise CheckpointError(f"{source}: the config is not valid: {error}") from error
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    chosen = getattr(config, "num_experts_per_tok", experts)  # some families have other names for it
    if experts and not (isinstance(experts, int) and isinstance(chosen, int) and 1 <= chosen <= experts):
        raise CheckpointError(f"{source}: {chosen!r} experts a token are wanted, the model has {experts!r}")
    if model_type in LATENT:
        _check_groups(config, source)
    config.output_router_logits = False  # else every forward would gather them for a training loss
    config.use_cache = False
    return config


def _check_groups(config: Any, source: str) -> None:
    """Of a LATENT model. What its router cannot choose from would be found at the first step."""
    sigmoid = config.model_type == "deepseek_v3"  # its routers know one method
    method = "group_limited_greedy" if sigmoid else config.topk_method
    if method not in ("greedy", "group_limited_greedy"):
        raise CheckpointError(
            f"{source}: topk_method must be greedy or group_limited_greedy for {config.model_type}, got {method!r}"
        )
    if method == "greedy":
        return
    experts, chosen = config.n_routed_experts, config.num_experts_per_tok
    groups, used = config.n_group or 0, config.topk_group or 0
    if groups < 1 or experts % groups or not 1 <= used <= groups or chosen > experts // groups * used:
        raise CheckpointError(
            f"{source}: {chosen} of {experts} experts a token do not fit {used} of {groups} groups of experts"
        )
    if sigmoid and experts == groups:  # a group's score is the sum of its best two
        raise CheckpointError(f"{source}: {groups} groups of one expert each are not supported")


def build_skeleton(config: Config, dtype: torch.dtype, source: str) -> nn.Module:
    """The causal language model of `config` on the meta device, in eval mode, its attention ours.

    Raises CheckpointError where transformers cannot build it.
    """
    transformers.AttentionInterface.register(attention.NAME, attention.paged_attention)
    try:
        with torch.device("meta"), no_init_weights():
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, attn_implementation=attention.NAME, dtype=dtype
            )
    except Exception as error:  # a config can be wrong in as many ways as there are models
        raise CheckpointError(f"{source}: no model can be built from the config: {error}") from error
    return model.eval().requires_grad_(False)


def build_random(values: Mapping[str, Any]) -> nn.Module:
    """A freshly initialised float32 model with transformers' own attention, to be trained."""
    config = build_config(values, "a new model")
    config.output_router_logits = True  # adds the loss that keeps the experts evenly used
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model


def tied_names(model: nn.Module) -> dict[str, str]:
    """Parameters that are others under a second name: `{"lm_head.weight": "model.embed_tokens.weight"}`."""
    return dict(model.all_tied_weights_keys)  # type: ignore[arg-type]


def compute_buffers(model: nn.Module, skeleton: nn.Module, device: str) -> None:
    """Fill the buffers of `model` that no checkpoint holds, such as rotary frequencies, by `skeleton`'s initialiser.

    Raises CheckpointError naming a buffer that it leaves untouched.
    """
    for name, module in model.named_modules():
        stale = {
            key: buffer
            for key, buffer in module.named_buffers(recurse=False)
            if key in module._non_persistent_buffers_set and buffer.is_meta
        }
        if not stale:
            continue
        for key, buffer in stale.items():
            blank = torch.full(buffer.shape, float("nan"), dtype=buffer.dtype, device=device)
            module._buffers[key] = blank
        with torch.no_grad():
            skeleton._init_weights(module)  # type: ignore[operator]
        for key in stale:
            filled = module._buffers[key]
            if filled is None or bool(torch.isnan(filled).any()):
                raise CheckpointError(f"transformers computes no value for the buffer {name}.{key}")
