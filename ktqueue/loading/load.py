"""Loads a model: opens its checkpoint, builds the skeleton, plans, injects operators, and fills in the weights."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ktqueue.core.errors import CheckpointError, RuleError
from ktqueue.families.table import family_of_type
from ktqueue.loading.checkpoint import DOWN, GATE_UP, Checkpoint, Progress
from ktqueue.loading.gguf.checkpoint import open_gguf
from ktqueue.loading.huggingface.checkpoint import open_folder
from ktqueue.loading.huggingface.config_check import LINEAR_ATTENTION, heads_by_layer
from ktqueue.loading.inject import inject
from ktqueue.loading.installed import FAMILIES, FORMATS, entry_names, package_of, package_of_module
from ktqueue.loading.materialize import check_tensors, materialize
from ktqueue.loading.model_path import SYNTHETIC_PREFIX, resolve_model
from ktqueue.loading.plan import LoadPlan, find_replaced, make_plan
from ktqueue.loading.rehearsal import rehearse, rehearse_without_weights
from ktqueue.loading.rules import load_rules, rules_file
from ktqueue.loading.skeleton import Config, build_config, build_skeleton, ignorable_names, tied_names
from ktqueue.loading.synthetic.checkpoint import open_synthetic
from ktqueue.loading.weight_formats import check_packages
from ktqueue.operators.attention import cap_of, chunk_of, window_of
from ktqueue.operators.base import Operator
from ktqueue.operators.gpu.cache_bounds import cache_scales
from ktqueue.operators.gpu.decoder import GpuDecoder
from ktqueue.operators.kv_cache import CacheScale, KVHeads, KVLayout
from ktqueue.operators.linear_attention import linear_attention_shape
from ktqueue.operators.registry import OPERATORS, check_operator, operator_class, operator_names
from ktqueue.operators.rotary import original_length

_LAYER = re.compile(r"\b(?:layers|h)\.(\d+)\.")
_LATENT_OPERATORS = ("CpuDecoder", "GpuDecoder", "LatentAttention")
_DECODERS = ("CpuDecoder", "GpuDecoder")


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What the model card says about the model.

    `quantization` is the format of most expert bytes, or of most bytes in a model without experts.
    """

    architecture: str
    quantization: str
    max_position_embeddings: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """What an attention plan on a GPU needs to know. `heads` are those of the query, `layer_heads` those of each layer.

    `layer_windows`: the sliding window of each layer with keys and values, in keys; 0 means no window. `layer_sinks`:
    whether its heads have a score without a value. `cap`, `chunk`: see ScoreOptions; some layers may have no chunks.
    """

    heads: int
    scaling: float
    layer_windows: tuple[int, ...]
    layer_sinks: tuple[bool, ...] = ()
    cap: float = 0.0
    chunk: int = 0
    layer_heads: tuple[int, ...] = ()

    @property
    def windows(self) -> frozenset[int]:
        """The windows of all layers."""
        return frozenset(self.layer_windows)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model in eval mode, with our attention and experts, and its config. For `packages` see
    `packages_of`, for `stated_scales` Checkpoint.cache_scales.

    Call: module(input_ids=[1, tokens], position_ids=[1, tokens], use_cache=False, logits_to_keep=rows to score,
    step=StepContext).logits -> [1, rows, vocab].
    """

    module: nn.Module
    config: Config
    card_facts: CardFacts
    dtype: torch.dtype
    attention: AttentionFacts
    plan: LoadPlan
    packages: tuple[str, ...] = ()
    stated_scales: Mapping[str, CacheScale] = field(default_factory=dict)

    @property
    def experts_per_token(self) -> int:
        """Number of experts per token in a routed layer; 0 for a model without experts."""
        return experts_per_token(self.config)

    def kv_layout(self, page_size: int, dtype: torch.dtype | None = None) -> KVLayout:
        """Return the layout of the model's cache. `page_size` is in tokens, `dtype` defaults to the model's.

        A float8 cache of a GpuDecoder has the scales that the files state, or else those that follow from weights.
        """
        layout = kv_layout(self.config, page_size, dtype or self.dtype)
        if layout.dtype.itemsize > 1 or not isinstance(self.module, GpuDecoder):
            return layout
        bounds = self.module.cache_bounds()
        return replace(layout, scales=cache_scales(bounds, self.stated_scales, latent=layout.latent is not None))


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A checked skeleton and its plan; no weights are loaded.

    `refusal`: why loading would fail, or None. `packages`: see `packages_of`.
    """

    checkpoint: Checkpoint
    config: Config
    skeleton: nn.Module
    plan: LoadPlan
    dtype: torch.dtype
    refusal: CheckpointError | RuleError | None = None
    packages: tuple[str, ...] = ()

    @property
    def vocab_size(self) -> int:
        """The number of embeddings, which all token ids are below. Raises CheckpointError."""
        return card_facts(self.config, self.checkpoint).vocab_size


def experts_per_token(config: Config) -> int:
    """Return the number of experts per token in a routed layer; 0 for a model without experts."""
    chosen = config.top_k_experts if getattr(config, "enable_moe_block", False) else None  # Gemma 4
    return int(chosen or getattr(config, "num_experts_per_tok", None) or 0)


def kv_layout(config: Config, page_size: int, dtype: torch.dtype) -> KVLayout:
    """Return the layout of the paged KV cache for a model with this config."""
    heads, kinds = config.num_attention_heads, getattr(config, "layer_types", None) or ()
    linear = kinds.count(LINEAR_ATTENTION)
    if latent := getattr(config, "kv_lora_rank", None):  # all heads share a latent and a rotary key
        return KVLayout(
            layers=config.num_hidden_layers,
            kv_heads=1,
            head_dim=latent + config.qk_rope_head_dim,
            page_size=page_size,
            dtype=dtype,
            latent=latent,
            index=config.index_head_dim if family_of_type(config.model_type).indexed else 0,
            original_length=original_length(config),
        )
    by_layer = tuple(KVHeads(kv_heads, head_dim) for kv_heads, head_dim in heads_by_layer(config))
    return KVLayout(
        layers=config.num_hidden_layers - linear,
        linear=(linear_attention_shape(config),) * linear if linear else (),
        kv_heads=by_layer[0].kv_heads if by_layer else getattr(config, "num_key_value_heads", None) or heads,
        head_dim=by_layer[0].head_dim if by_layer else getattr(config, "head_dim", None) or config.hidden_size // heads,
        page_size=page_size,
        dtype=dtype,
        original_length=original_length(config),
        by_layer=by_layer if len({*by_layer}) > 1 else (),
    )


def attention_facts(skeleton: nn.Module, config: Config) -> AttentionFacts:
    """Return the facts of all attention modules."""
    scalings, windows, caps, chunks, sinks, heads = set(), [], {0.0}, {0}, [], []
    for _, module in _attention_modules(skeleton):
        sinks.append(any("sink" in name for name, _ in module.named_parameters(recurse=False)))
        heads.append(int(getattr(module, "num_heads", config.num_attention_heads)))
        windows.append(window_of(module, config))
        caps.add(cap_of(module))
        chunks.add(chunk_of(module, config))
        scalings.add(float(module.scaling))
    scaling = max(scalings, default=1.0)
    return AttentionFacts(
        heads=config.num_attention_heads,
        scaling=scaling,
        layer_windows=tuple(windows) or (0,),
        layer_sinks=tuple(sinks),
        cap=max(caps),
        chunk=max(chunks),
        layer_heads=tuple(heads),
    )


def _attention_modules(skeleton: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules that have a layer index and a scaling, by name."""
    for name, module in skeleton.named_modules():
        if getattr(module, "layer_idx", None) is not None and getattr(module, "scaling", None) is not None:
            yield name, module


def prepare(path: str, *, rules: str | None, device: str, dtype: torch.dtype) -> PreparedModel:
    """Open the checkpoint, build and check the skeleton, plan, and rehearse without weights.

    Raises CheckpointError, RuleError.
    """
    checkpoint = open_checkpoint(path)
    config, skeleton = build_checked_skeleton(checkpoint, dtype)
    modules = [(name, type(module).__name__) for name, module in skeleton.named_modules()]
    file = rules_file(rules)
    plan = make_plan(modules, load_rules(file, operator_names(), check_operator), device, _name(dtype))
    packages = packages_of(checkpoint, config, plan)
    layout = kv_layout(config, 1, dtype)
    if layout.latent:
        _check_replaced(_attention_modules(skeleton), _LATENT_OPERATORS, plan, str(file))
    if layout.linear or family_of_type(config.model_type).chunked:
        _check_replaced([("", skeleton)], _DECODERS, plan, str(file))
    try:
        _check_one_device(skeleton, plan, str(file), device)
        plan = rehearse_without_weights(skeleton, plan, layout, checkpoint.path)
    except (CheckpointError, RuleError) as error:
        return PreparedModel(checkpoint, config, skeleton, plan, dtype, error, packages)
    return PreparedModel(checkpoint, config, skeleton, plan, dtype, None, packages)


def packages_of(checkpoint: Checkpoint, config: Config, plan: LoadPlan) -> tuple[str, ...]:
    """Return the installed packages that compute or decode a part of the model, with their versions.

    They bring its family, formats of its weights, or operators. Such a name is `warm-moe 1.0`.
    """
    found = {package_of(FAMILIES, config.model_type)}
    offered = {*entry_names(FORMATS)}
    found |= {package_of(FORMATS, quant) for quant in {*map(checkpoint.quant, checkpoint.names())} & offered}
    operators = {operator_class(item.op) for item in plan.replacements} - {*OPERATORS.values()}
    found |= {package_of_module(operator.__module__) for operator in operators}
    return tuple(sorted(name for name in found if name is not None))


def build_checked_skeleton(checkpoint: Checkpoint, dtype: torch.dtype) -> tuple[Config, nn.Module]:
    """Return the config and the skeleton of a checkpoint's model. Their tensors are exactly those of the checkpoint.

    Raises CheckpointError.
    """
    config = build_config(checkpoint.config(), checkpoint.path)
    _check_layer_count(config, checkpoint)
    skeleton = build_skeleton(config, dtype, checkpoint.path)
    if _has_separate_head(skeleton, checkpoint):
        config.tie_word_embeddings = False
        skeleton = build_skeleton(config, dtype, checkpoint.path)
    copies = tied_names(skeleton).keys() & set(checkpoint.names())
    for name in (*copies, *ignorable_names(skeleton, checkpoint.names())):  # no module reads them
        checkpoint.ignore(name)
    check_tensors(skeleton, checkpoint)
    return config, skeleton


def _has_separate_head(skeleton: nn.Module, checkpoint: Checkpoint) -> bool:
    """Whether the file holds different numbers for two tensors that the config says are one.

    The file takes precedence then, as in transformers.
    """
    tied, names = tied_names(skeleton), set(checkpoint.names())
    return any(
        {target, source} <= names and not checkpoint.are_equal(target, source) for target, source in tied.items()
    )


def _check_replaced(
    modules: Iterable[tuple[str, nn.Module]], known: tuple[str, ...], plan: LoadPlan, rules: str
) -> None:
    """Check that operators of ours, the `known` ones, replace all these modules: only they can read our cache.

    Raises RuleError.
    """
    operators = {replacement.name: replacement.op for replacement in plan.replacements}
    for name, module in modules:
        ancestor = find_replaced(name, operators)
        if ancestor is None or operators[ancestor] not in known:
            raise RuleError(
                f"{rules}: {name or 'the model'} ({type(module).__name__}) must be replaced by {' or '.join(known)}, "
                f"{'but no rule does so' if ancestor is None else f'but {operators[ancestor]} replaces it'}"
            )


def _check_one_device(skeleton: nn.Module, plan: LoadPlan, rules: str, model_device: str) -> None:
    """Check that all modules are on the model's device.

    Only an operator such as CpuExperts, with `any_device`, moves the numbers of a step to another device and back.
    """
    operators = {replacement.name: replacement.op for replacement in plan.replacements}
    for name, module in skeleton.named_modules():
        ancestor = find_replaced(name, operators)
        if next(module.parameters(recurse=False), None) is None or (
            ancestor is not None and operator_class(operators[ancestor]).any_device
        ):
            continue
        if _with_index(device := plan.device_of(name)) != _with_index(model_device):
            raise RuleError(
                f"{rules}: {name} ({type(module).__name__}) would be on {device}, the model is on {model_device}: only "
                "CpuExperts, and operators with any_device, can be on another device than the model",
                param="engine.rules",
                limit=model_device,
                value=device,
            )


def _with_index(device: str) -> tuple[str, int]:
    """Type and number of a device: that of `cuda` is 0."""
    known = torch.device(device)
    return known.type, known.index or 0


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_layer_count(config: Config, checkpoint: Checkpoint) -> None:
    """Check that the config has no more layers than the file: a wrong number would build a skeleton of any size."""
    stated = getattr(config, "num_hidden_layers", None)
    found = len({match[1] for name in checkpoint.names() if (match := _LAYER.search(name))})
    if not found:
        raise CheckpointError(
            f"{checkpoint.path}: no tensor belongs to a layer named layers.N or h.N, as in all supported models; "
            f"model_type is {config.model_type}"
        )
    if not isinstance(stated, int) or stated > found:
        raise CheckpointError(
            f"{checkpoint.path}: num_hidden_layers is {stated!r}, but there are tensors of {found} layers",
            param="num_hidden_layers",
            limit=found,
            value=repr(stated),
        )


def load_model(
    path: str,
    *,
    rules: str | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a .gguf file, a Hugging Face folder or `demo`. For `rules` see rules_file.

    Raises CheckpointError that names file and tensor, RuleError that names file:line.
    """
    prepared = prepare(path, rules=rules, device=device, dtype=dtype)
    return load_prepared(prepared, progress)


def load_prepared(prepared: PreparedModel, progress: Progress | None = None) -> LoadedModel:
    """Load a prepared model.

    Raises its refusal, CheckpointError that names file and tensor, or torch.OutOfMemoryError.
    """
    if prepared.refusal is not None:
        raise prepared.refusal
    facts = card_facts(prepared.config, prepared.checkpoint)
    attention = attention_facts(prepared.skeleton, prepared.config)
    module, operators = inject(prepared.skeleton, prepared.plan)
    materialize(module, prepared.skeleton, operators, prepared.checkpoint, prepared.plan, progress)
    stated = prepared.checkpoint.cache_scales
    prepared.checkpoint.close()
    module.eval()
    if not isinstance(module, Operator):
        is_rounded = any(item.options.get("activations") != "float32" for item in prepared.plan.replacements)
        layout = kv_layout(prepared.config, 1, prepared.dtype)
        rehearse(module, layout, prepared.checkpoint.path, is_rounded=is_rounded)
    return LoadedModel(
        module, prepared.config, facts, prepared.dtype, attention, prepared.plan, prepared.packages, stated
    )


def card_facts(config: Config, checkpoint: Checkpoint) -> CardFacts:
    """Return the facts for the model card. Raises CheckpointError if the config lacks one."""
    for name in ("max_position_embeddings", "vocab_size"):
        if not isinstance(getattr(config, name, None), int):
            raise CheckpointError(
                f"{checkpoint.path}: the config of a {config.model_type} states no {name}; a model without it is not "
                "supported",
                param=name,
            )
    format_bytes: Counter[str] = Counter()
    experts = {f"{module}.{part}" for module in checkpoint.expert_modules() for part in (GATE_UP, DOWN)}
    for name in experts or checkpoint.names():
        format_bytes[checkpoint.quant(name)] += checkpoint.nbytes(name)
    return CardFacts(
        architecture=(config.architectures or [type(config).__name__])[0],
        quantization=format_bytes.most_common(1)[0][0],
        max_position_embeddings=config.max_position_embeddings,
        vocab_size=config.vocab_size,
    )


def open_checkpoint(path: str) -> Checkpoint:
    """Open a .gguf file (any part of a split one), a folder, `demo`, or `synthetic:SHAPE[:QUANT[:LAYERS]]`.

    Raises CheckpointError that names the file and the tensor or key at fault.
    """
    if path.startswith(SYNTHETIC_PREFIX):
        return open_synthetic(path)
    found = resolve_model(path)
    checkpoint = open_folder(found) if found.is_dir() else open_gguf(found)
    check_packages(map(checkpoint.quant, checkpoint.names()))
    return checkpoint
