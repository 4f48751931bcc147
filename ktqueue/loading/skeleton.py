"""A transformers model without weights (the door to transformers): config, module tree on the meta device, what
it shares and what it computes for itself. Knows no file format and no rules."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers.initialization import no_init_weights

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.huggingface.config_check import (
    DERIVED_KEY,
    LATENT_MODEL_TYPES,
    check_config,
    check_quantization,
    check_values,
    ignored_keys,
)
from ktqueue.operators import attention
from ktqueue.operators.decoder_facts import CLASSES

Config = transformers.PretrainedConfig


def build_config(values: Mapping[str, Any], source: str) -> Config:
    """A transformers config from plain values. Raises CheckpointError for an unknown or unusable one."""
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
        raise CheckpointError(
            f"{source}: model_type {model_type!r} is unknown to transformers {transformers.__version__}"
        )
    if model_type == "mistral" and "layer_types" in values:  # as transformers.AutoConfig has it
        model_type = "ministral"
    config_class = transformers.CONFIG_MAPPING[model_type]
    if config_class not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise CheckpointError(f"{source}: a model of type {model_type} is no causal language model")
    if values.get("kv_lora_rank") and model_type not in LATENT_MODEL_TYPES:
        known = ", ".join(LATENT_MODEL_TYPES)
        raise CheckpointError(
            f"{source}: multi-head latent attention of {model_type} is not supported; that of {known} is"
        )
    check_quantization(values, source)
    check_values(values, source)
    try:
        values = Config._decode_special_floats(dict(values))  # as transformers writes what JSON has no numbers for
        config: Config = config_class.from_dict(dict(values))
        if ignored := ignored_keys(values, config_class):
            config = config_class.from_dict({name: value for name, value in values.items() if name not in ignored})
            for name in ignored - {DERIVED_KEY}:
                if hasattr(config, name):  # made of other keys, which it goes before
                    setattr(config, name, values[name])
    except Exception as error:  # each config class validates in its own way
        raise CheckpointError(f"{source}: the config is not valid: {error}") from error
    check_config(config, source)
    config.output_router_logits = False  # else every forward would gather them for a training loss
    config.use_cache = False
    return config


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
    except KeyError as error:  # of a table of transformers: activations, rotary embeddings
        raise _unknown(config, error, source) from error
    except Exception as error:  # a config can be wrong in as many ways as there are models
        raise CheckpointError(f"{source}: no model can be built from the config: {error}") from error
    _check_kind(model, config, source)
    _check_heads(model, config, source)
    _keep_in_float32(model, dtype)
    return model.eval().requires_grad_(False)


def _keep_in_float32(model: Any, dtype: torch.dtype) -> None:
    """Give tensors that the model wants in float32 that type, as transformers does when it loads one in another: what
    corrects a router's scores, which in bfloat16 would choose other experts."""
    for pattern, kept in model._get_dtype_plan(dtype).items():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if re.search(pattern.replace("*", ".*"), name):
                tensor.data = tensor.data.to(kept)


def _unknown(config: Config, error: KeyError, source: str) -> CheckpointError:
    """The refusal that names the field which has the value that was not found."""
    value = next(iter(error.args), None)
    if value == attention.NAME:
        return CheckpointError(f"{source}: a {config.model_type} attends in a way of its own, which is not supported")
    fields = config.to_dict()
    inner = [one for one in fields.values() if isinstance(one, dict)]  # rotary parameters, if there is one set of them
    for name, stated in (pair for group in (*inner, fields) for pair in group.items()):
        if type(stated) is type(value) and stated == value:
            limit = f"one that transformers {transformers.__version__} knows"
            return CheckpointError(
                f"{source}: {name} must be {limit}, got {value!r}", param=name, limit=limit, value=str(value)
            )
    return CheckpointError(f"{source}: no model can be built from the config: KeyError: {error}")


def _check_kind(model: Any, config: Config, source: str) -> None:
    """Between steps keys and values are kept, which attention of ours writes and reads: nothing else would be there.

    Raises CheckpointError.
    """
    if model._is_stateful and not getattr(config, "layer_types", None):  # those say more, and have been looked at
        raise CheckpointError(
            f"{source}: a {config.model_type} keeps more than keys and values, which is not supported"
        )


def _check_heads(model: nn.Module, config: Any, source: str) -> None:
    """Of the models that we know: what transformers makes by head_dim must fit its heads, or no step could be computed.

    Raises CheckpointError.
    """
    latent = config.model_type in LATENT_MODEL_TYPES
    if not latent and type(model).__name__ not in CLASSES:
        return
    attention: Any = model.get_submodule("model.layers.0.self_attn")
    name, width = ("qk_rope_head_dim", config.qk_rope_head_dim) if latent else ("head_dim", attention.head_dim)
    made = {"rotary embeddings": 2 * model.get_buffer("model.rotary_emb.inv_freq").numel()}
    if type(model).__name__ == "OlmoeForCausalLM":  # normed over all heads at once, in a width of its own
        made["norms"] = attention.q_norm.weight.numel() // config.num_attention_heads
    for what, columns in made.items():
        if columns != width:
            raise CheckpointError(
                f"{source}: {name} must be the width of {what}, which is {columns} where head_dim is "
                f"{getattr(config, 'head_dim', None)}, got {width}",
                param=name,
                limit=columns,
                value=width,
            )


def build_random(values: Mapping[str, Any]) -> nn.Module:
    """A freshly initialised float32 model with transformers' own attention, to be trained."""
    config = build_config(values, "a new model")
    config.output_router_logits = True  # adds the loss that keeps the experts evenly used
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model


def tied_names(model: nn.Module) -> dict[str, str]:
    """Parameters that are others under a second name: `{"lm_head.weight": "model.embed_tokens.weight"}`."""
    return dict(model.all_tied_weights_keys)  # type: ignore[arg-type]


def ignorable_names(model: Any, names: Iterable[str]) -> list[str]:
    """Those of a file's names that transformers knows to have no place in the model: of layers that guess tokens ahead,
    which it does not build."""
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    own = model.state_dict().keys()
    return [name for name in names if name not in own and any(re.search(pattern, name) for pattern in patterns)]


def compute_buffers(model: nn.Module, skeleton: nn.Module, device: str) -> None:
    """Fill the buffers of `model` that no checkpoint holds, such as rotary frequencies, by `skeleton`'s initialiser.

    Parameters stay, and so do other buffers: the initialiser passes over what has the mark of a checkpoint's. Raises
    CheckpointError naming a buffer that it leaves untouched.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    owners = {"": skeleton}
    for name, module in model.named_modules():
        # A model within the model has an initialiser of its own, which knows more of its parts.
        owners[name] = module if isinstance(module, transformers.PreTrainedModel) else owners[name.rpartition(".")[0]]
        blank = {
            key: torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
            for key, buffer in module.named_buffers(recurse=False)
            if key in module._non_persistent_buffers_set and buffer.is_meta
        }
        if not blank:
            continue
        module._buffers.update(blank)
        with torch.no_grad():
            owners[name]._init_weights(module)  # type: ignore[operator]
        for key, buffer in blank.items():
            if module._buffers[key] is buffer and buffer._version == 0:  # nobody has written to it
                raise CheckpointError(f"transformers computes no value for the buffer {name}.{key}")
