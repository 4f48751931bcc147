"""A transformers model without weights: its config and its module tree on the meta device.

Also which tensors it shares and which it computes by itself. Knows no file format and no rules.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers.initialization import no_init_weights

from ktqueue.core.errors import CheckpointError
from ktqueue.core.short_repr import MAX_TEXT, short_repr, short_text
from ktqueue.families.table import BY_CLASS, FAMILIES, family_of_type
from ktqueue.loading.huggingface.causal_models import CAUSAL_MODELS, config_class_of
from ktqueue.loading.huggingface.config_check import (
    DERIVED_KEY,
    check_config,
    check_nulls,
    check_rope,
    check_values,
    ignored_keys,
    rope_parameters,
    several_models,
    stated_values,
)
from ktqueue.loading.huggingface.config_faults import find_fault
from ktqueue.loading.huggingface.quantisation import read_quantisation
from ktqueue.loading.unsupported import check_model_type
from ktqueue.operators import attention
from ktqueue.operators.rotary import rotary_kinds, rotary_pairs, separate_lengths

Config = transformers.PretrainedConfig
_USABLE = f"one that transformers {transformers.__version__} can use"
_ROPE = ("rope_parameters", "rope_scaling")
_UNCLEAR = (AttributeError, TypeError, IndexError, ArithmeticError)
"""Errors of config classes that may name no value."""


def build_config(values: Mapping[str, Any], source: str) -> Config:
    """Build a transformers config from plain values. Raises CheckpointError for an unknown or unusable one."""
    values = {key: _longrope(value) if key in _ROPE else value for key, value in values.items()}
    model_type = values.get("model_type")
    check_model_type(values, source)
    if model_type == "mistral" and "layer_types" in values:  # as transformers.AutoConfig does
        model_type = "ministral"
    text = values.get("text_config")
    if isinstance(text, Mapping) and model_type in transformers.CONFIG_MAPPING and model_type not in CAUSAL_MODELS:
        raise several_models(model_type, text.get("model_type"), source)
    config_class = config_class_of(model_type, source)
    family = family_of_type(model_type)
    if values.get("kv_lora_rank") and not family.latent:
        known = ", ".join(known.model_type for known in FAMILIES if known.latent)
        raise CheckpointError(f"{source}: multi-head latent attention is supported for {known}, not for {model_type}")
    read_quantisation(values, source)
    check_values(values, source, config_class.attribute_map)
    key = family.rotated_key
    if key and values.get(key) and values.get("head_dim"):
        values = {"partial_rotary_factor": values[key] / values["head_dim"], **values}
    try:
        values = stated_values(values, config_class)
        values = Config._decode_special_floats(values)  # transformers encodes infinity and NaN, which JSON lacks
        config: Config = config_class.from_dict(dict(values))
        if ignored := ignored_keys(values, config_class):
            config = config_class.from_dict({name: value for name, value in values.items() if name not in ignored})
            for name in ignored - {DERIVED_KEY}:
                if hasattr(config, name):  # derived from other keys; the stated value has precedence
                    setattr(config, name, values[name])
    except Exception as error:  # each config class validates differently
        check_rope(values, source)
        fault = isinstance(error, _UNCLEAR) and find_fault(values, config_class.from_dict, _USABLE, source)
        raise fault or CheckpointError(
            f"{source}: the config is not valid: {short_text(error.__cause__ or error)}"
        ) from error
    check_config(config, source)
    config.output_router_logits = False  # otherwise every forward collects them for a training loss
    config.use_cache = False
    return config


def _longrope(rope: Any) -> Any:
    """Return rotary parameters with the present name of `su`, as the first Phi-3 folders call longrope."""
    if not isinstance(rope, Mapping):
        return rope
    return {key: "longrope" if key in ("rope_type", "type") and value == "su" else value for key, value in rope.items()}


def build_skeleton(config: Config, dtype: torch.dtype, source: str) -> nn.Module:
    """Build the causal language model of `config` on the meta device, in eval mode, with our attention.

    Raises CheckpointError if transformers cannot build it.
    """
    transformers.AttentionInterface.register(attention.NAME, attention.paged_attention)
    try:
        model = _build(config, dtype)
    except Exception as error:  # each model fails in its own way on a wrong config
        if unknown := _unknown_value(config, error, source):
            raise unknown from error
        check_nulls(config, source)
        fault = find_fault(
            config.to_dict(),
            lambda values: _build(type(config).from_dict(values), dtype),
            _USABLE,
            source,
            only_void=True,
        )
        raise fault or CheckpointError(
            f"{source}: no model can be built from the config: {type(error).__name__}: {short_text(error)}"
        ) from error
    _check_kind(model, config, source)
    _check_heads(model, config, source)
    _keep_in_float32(model, dtype)
    try:
        separate_lengths(model)
    except ValueError as error:
        raise CheckpointError(f"{source}: a {config.model_type} is not supported, because {error}") from error
    return model.eval().requires_grad_(False)


def _keep_in_float32(model: Any, dtype: torch.dtype) -> None:
    """Use float32 for tensors that the model wants in it, as transformers does when it loads a model in another type.

    One of them corrects the scores of a router, which would choose other experts in bfloat16.
    """
    for pattern, kept in model._get_dtype_plan(dtype).items():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if re.search(pattern.replace("*", ".*"), name):
                tensor.data = tensor.data.to(kept)


def _unknown_value(config: Config, error: Exception, source: str) -> CheckpointError | None:
    """Return the error that names the config field whose value is unknown to transformers, if that is the reason."""
    value = next(iter(error.args), None)
    if not isinstance(error, KeyError):
        return None
    if value == attention.NAME:
        return CheckpointError(
            f"{source}: a {config.model_type} uses its own kind of attention, which is not supported"
        )
    fields = config.to_dict()
    for group in (*rope_parameters(fields), fields):
        for name, stated in group.items():
            if type(stated) is type(value) and stated == value and (stated or group is not fields):
                limit = f"one that transformers {transformers.__version__} knows"
                shown = short_repr(value)
                return CheckpointError(
                    f"{source}: {name} must be {limit}, got {shown}",
                    param=name,
                    limit=limit,
                    value=str(value)[:MAX_TEXT],
                )
    return None


def _check_kind(model: Any, config: Config, source: str) -> None:
    """Check that the model keeps only keys and values between steps, which our attention reads and writes.

    Raises CheckpointError.
    """
    if model._is_stateful and not getattr(config, "layer_types", None):  # check_config has checked those
        raise CheckpointError(
            f"{source}: a {config.model_type} keeps more than keys and values between steps, which is not supported"
        )


def _check_heads(model: nn.Module, config: Any, source: str) -> None:
    """Check, for models that we know, that what transformers sizes by head_dim fits the heads.

    Otherwise every step would fail. Raises CheckpointError.
    """
    family = BY_CLASS.get(type(model).__name__)
    if family is None:
        return
    layers: Any = model.get_submodule("model.layers")
    attentions: list[Any] = [layer.self_attn for layer in layers if hasattr(layer, "self_attn")]
    if not attentions:
        raise CheckpointError(f"{source}: a {config.model_type} of which no layer has keys and values is not supported")
    rotary: Any = model.get_submodule("model.rotary_emb")
    kinds = rotary_kinds(rotary)
    name = "qk_rope_head_dim" if family.latent else "head_dim"
    pairs = rotary_pairs(rotary, kinds)
    checks = []  # what has a width, and that of the heads
    for found in attentions:
        kind = config.layer_types[found.layer_idx] if kinds else ""
        rope = config.rope_parameters[kind] if kinds else config.rope_parameters
        part = rope.get("partial_rotary_factor", 1.0) if family.partly_rotated else 1.0
        width = int(part * (config.qk_rope_head_dim if family.latent else found.head_dim))
        checks.append(("rotary embeddings", 2 * pairs[kinds.index(kind) if kinds else 0], width))
        if family.single_norms:
            checks.append(("norms", found.q_norm.weight.numel() // config.num_attention_heads, width))
    for what, columns, width in checks:
        if columns != width:
            raise CheckpointError(
                f"{source}: {name} must be the width of {what}, which is {columns} for head_dim "
                f"{vars(config).get('head_dim')}, got {width}",
                param=name,
                limit=columns,
                value=width,
            )


def build_original(config: Config) -> nn.Module:
    """Build the model on the meta device in float32, with transformers' own attention over whole sequences."""
    return _build(config, torch.float32, "eager").eval().requires_grad_(False)


def _build(config: Config, dtype: torch.dtype, attention_name: str = attention.NAME) -> nn.Module:
    with torch.device("meta"), no_init_weights():
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation=attention_name, dtype=dtype
        )
    return model


def build_random(values: Mapping[str, Any]) -> nn.Module:
    """Build a freshly initialised float32 model with transformers' own attention, for training."""
    config = build_config(values, "a new model")
    config.output_router_logits = True  # adds the loss that balances the use of experts
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model


def tied_names(model: nn.Module) -> dict[str, str]:
    """Map each tied parameter to its source, such as `{"lm_head.weight": "model.embed_tokens.weight"}`."""
    return dict(model.all_tied_weights_keys)  # type: ignore[arg-type]


def ignorable_names(model: Any, names: Iterable[str]) -> list[str]:
    """Return the names in a file that have no place in the model and that transformers ignores on purpose.

    These are tensors of layers that predict further tokens, which transformers does not build.
    """
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    model_names = model.state_dict().keys()
    return [name for name in names if name not in model_names and any(re.search(pattern, name) for pattern in patterns)]


def compute_buffers(model: nn.Module, skeleton: nn.Module, device: str) -> None:
    """Fill the buffers of `model` that no checkpoint holds, such as rotary frequencies, with `skeleton`'s initialiser.

    Parameters and other buffers keep their values: the initialiser skips tensors that are marked as loaded. Raises
    CheckpointError that names a buffer that the initialiser does not fill.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    owners = {"": skeleton}
    for name, module in model.named_modules():
        # A model inside the model has its own initialiser, which knows more of its modules.
        owners[name] = module if isinstance(module, transformers.PreTrainedModel) else owners[name.rpartition(".")[0]]
        missing = {
            key: torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
            for key, buffer in module.named_buffers(recurse=False)
            if key in module._non_persistent_buffers_set and buffer.is_meta
        }
        if not missing:
            continue
        module._buffers.update(missing)
        with torch.no_grad():
            owners[name]._init_weights(module)  # type: ignore[operator]
        for key, buffer in missing.items():
            if module._buffers[key] is buffer and buffer._version == 0:  # no code has written to it
                raise CheckpointError(f"transformers does not compute the buffer {name}.{key}")
