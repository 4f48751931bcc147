"""A model file to a model that runs: checkpoint -> skeleton -> plan -> inject -> materialize."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ktqueue.core.errors import CheckpointError, RuleError
from ktqueue.loading.checkpoint import DOWN, GATE_UP, Checkpoint
from ktqueue.loading.gguf.checkpoint import open_gguf
from ktqueue.loading.huggingface.checkpoint import open_folder
from ktqueue.loading.huggingface.config_check import longest_context
from ktqueue.loading.inject import inject
from ktqueue.loading.materialize import Progress, check_tensors, materialize
from ktqueue.loading.model_path import SYNTHETIC_PREFIX, resolve_model
from ktqueue.loading.plan import LoadPlan, find_replaced, make_plan
from ktqueue.loading.rehearsal import rehearse, rehearse_without_weights
from ktqueue.loading.rules import load_rules, rules_file
from ktqueue.loading.skeleton import Config, build_config, build_skeleton, ignorable_names, tied_names
from ktqueue.loading.synthetic.checkpoint import open_synthetic
from ktqueue.operators import decoder as _decoder  # noqa: F401  (these enter their operators in the registry)
from ktqueue.operators import experts as _experts  # noqa: F401
from ktqueue.operators import latent_attention as _latent_attention  # noqa: F401
from ktqueue.operators import linear as _linear  # noqa: F401
from ktqueue.operators.base import Operator, registry
from ktqueue.operators.gpu import decoder as _gpu_decoder  # noqa: F401
from ktqueue.operators.kv_cache import KVLayout
from ktqueue.operators.window import window_of

_LAYER = re.compile(r"\.(?:layers|h)\.(\d+)\.")
_ATTEND_LATENTS = ("LatentAttention", "GpuDecoder")


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What the model card says of the weights. `quantization`: the type that most expert bytes are stored in (of a
    model without experts: most bytes). `max_position_embeddings`: see longest_context."""

    architecture: str
    quantization: str
    max_position_embeddings: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """What plans of a GPU's attention must know. `heads`: of the query. `windows`: sliding ones, in keys; 0 is none."""

    heads: int
    scaling: float
    windows: frozenset[int]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model in eval mode, its attention and experts ours, and its config.

    Call: module(input_ids=[1, tokens], position_ids=[1, tokens], use_cache=False,
    logits_to_keep=rows to score, step=StepContext).logits -> [1, rows, vocab].
    """

    module: nn.Module
    config: Config
    card_facts: CardFacts
    dtype: torch.dtype
    attention: AttentionFacts
    plan: LoadPlan

    @property
    def experts_per_token(self) -> int:
        """Of a routed layer; 0: the model has none."""
        return experts_per_token(self.config)

    def kv_layout(self, page_size: int, dtype: torch.dtype | None = None) -> KVLayout:
        """The cache that the model's attention needs, for pages of `page_size` tokens; in `dtype`, else the model's."""
        return kv_layout(self.config, page_size, dtype or self.dtype)


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A checked skeleton with its plan; nothing is loaded yet. `refusal`: why it cannot be, if it cannot."""

    checkpoint: Checkpoint
    config: Config
    skeleton: nn.Module
    plan: LoadPlan
    dtype: torch.dtype
    refusal: CheckpointError | RuleError | None = None


def experts_per_token(config: Config) -> int:
    """Of a routed layer of a model of that config; 0: it has none."""
    return int(getattr(config, "num_experts_per_tok", None) or 0)


def kv_layout(config: Config, page_size: int, dtype: torch.dtype) -> KVLayout:
    """The cache of a model of that config."""
    heads = config.num_attention_heads
    if latent := getattr(config, "kv_lora_rank", None):  # a latent and a rotary key, which all heads share
        return KVLayout(
            layers=config.num_hidden_layers,
            kv_heads=1,
            head_dim=latent + config.qk_rope_head_dim,
            page_size=page_size,
            dtype=dtype,
            latent=latent,
        )
    return KVLayout(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        page_size=page_size,
        dtype=dtype,
    )


def attention_facts(skeleton: nn.Module, config: Config) -> AttentionFacts:
    """The facts of all attention modules."""
    scalings, windows = set(), set()
    for _, module in _attention_modules(skeleton):
        windows.add(window_of(module, config))
        scalings.add(float(module.scaling))
    return AttentionFacts(config.num_attention_heads, max(scalings, default=1.0), frozenset(windows or {0}))


def _attention_modules(skeleton: nn.Module) -> Iterator[tuple[str, Any]]:
    """Those with a layer and a scaling, by name."""
    for name, module in skeleton.named_modules():
        if getattr(module, "layer_idx", None) is not None and getattr(module, "scaling", None) is not None:
            yield name, module


def prepare(path: str, *, rules: str | None, device: str, dtype: torch.dtype) -> PreparedModel:
    """Open, build the skeleton, compare it with the file, plan and rehearse without weights.

    Raises CheckpointError, RuleError.
    """
    checkpoint = open_checkpoint(path)
    config, skeleton = build_checked_skeleton(checkpoint, dtype)
    modules = [(name, type(module).__name__) for name, module in skeleton.named_modules()]
    file = rules_file(rules)
    plan = make_plan(modules, load_rules(file, registry), device, _name(dtype))
    layout = kv_layout(config, 1, dtype)
    if layout.latent:
        _check_latent_attention(skeleton, plan, str(file))
    try:
        _check_one_device(skeleton, plan, str(file), device)
        plan = rehearse_without_weights(skeleton, plan, layout, checkpoint.path)
    except (CheckpointError, RuleError) as error:
        return PreparedModel(checkpoint, config, skeleton, plan, dtype, error)
    return PreparedModel(checkpoint, config, skeleton, plan, dtype)


def build_checked_skeleton(checkpoint: Checkpoint, dtype: torch.dtype) -> tuple[Config, nn.Module]:
    """The config and the skeleton of a checkpoint's model, whose tensors are just those that it has.

    Raises CheckpointError.
    """
    config = build_config(checkpoint.config(), checkpoint.path)
    _check_depth(config, checkpoint)
    skeleton = build_skeleton(config, dtype, checkpoint.path)
    if _has_a_head_of_its_own(skeleton, checkpoint):
        config.tie_word_embeddings = False
        skeleton = build_skeleton(config, dtype, checkpoint.path)
    copies = tied_names(skeleton).keys() & set(checkpoint.names())
    for name in (*copies, *ignorable_names(skeleton, checkpoint.names())):  # nobody reads them
        checkpoint.leave_out(name)
    check_tensors(skeleton, checkpoint)
    return config, skeleton


def _has_a_head_of_its_own(skeleton: nn.Module, checkpoint: Checkpoint) -> bool:
    """Whether the file has a tensor twice, with other numbers, that the config says to be one: the file is right then,
    as in transformers."""
    tied, names = tied_names(skeleton), set(checkpoint.names())
    return any({one, other} <= names and not checkpoint.alike(one, other) for one, other in tied.items())


def _check_latent_attention(skeleton: nn.Module, plan: LoadPlan, rules: str) -> None:
    """A cache of latents is read by operators of ours alone."""
    operators = {one.name: one.op for one in plan.replacements}
    for name, module in _attention_modules(skeleton):
        place = find_replaced(name, operators)
        if place is None or operators[place] not in _ATTEND_LATENTS:
            raise RuleError(
                f"{rules}: {name} ({type(module).__name__}) must be replaced by {' or '.join(_ATTEND_LATENTS)}, "
                f"{'no rule does so' if place is None else f'which {operators[place]} is not'}"
            )


def _check_one_device(skeleton: nn.Module, plan: LoadPlan, rules: str, home: str) -> None:
    """A step's numbers stay where the model is: only CpuExperts fetches and returns them."""
    operators = {one.name: one.op for one in plan.replacements}
    for name, module in skeleton.named_modules():
        place = find_replaced(name, operators)
        if next(module.parameters(recurse=False), None) is None or (place and operators[place] == "CpuExperts"):
            continue
        if torch.device(device := plan.device_of(name)) not in (torch.device(home), torch.device(f"{home}:0")):
            raise RuleError(
                f"{rules}: {name} ({type(module).__name__}) would be on {device}, the model is on {home}: only "
                "CpuExperts can be on another device than the model",
                param="engine.rules",
                limit=home,
                value=device,
            )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_depth(config: Config, checkpoint: Checkpoint) -> None:
    """A wrong layer count would build a skeleton of any size."""
    stated = getattr(config, "num_hidden_layers", None)
    found = len({match[1] for name in checkpoint.names() if (match := _LAYER.search(name))})
    if not found:
        raise CheckpointError(
            f"{checkpoint.path}: there are no tensors of layers named layers.N or h.N, as supported models have them; "
            f"model_type is {config.model_type}"
        )
    if not isinstance(stated, int) or stated > found:
        raise CheckpointError(
            f"{checkpoint.path}: num_hidden_layers is {stated!r}, there are tensors of {found} layers",
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
    """Load a .gguf file, a Hugging Face folder or `demo`; `rules`: see rules_file.

    Raises CheckpointError naming file and tensor, RuleError naming file:line.
    """
    prepared = prepare(path, rules=rules, device=device, dtype=dtype)
    return load_prepared(prepared, progress)


def load_prepared(prepared: PreparedModel, progress: Progress | None = None) -> LoadedModel:
    """Load what has been prepared. Raises its refusal, and CheckpointError naming file and tensor."""
    if prepared.refusal is not None:
        raise prepared.refusal
    facts = card_facts(prepared.config, prepared.checkpoint)
    attention = attention_facts(prepared.skeleton, prepared.config)
    module, operators = inject(prepared.skeleton, prepared.plan)
    materialize(module, prepared.skeleton, operators, prepared.checkpoint, prepared.plan, progress)
    prepared.checkpoint.close()
    module.eval()
    if not isinstance(module, Operator):
        rehearse(module, kv_layout(prepared.config, 1, prepared.dtype), prepared.checkpoint.path)
    return LoadedModel(module, prepared.config, facts, prepared.dtype, attention, prepared.plan)


def card_facts(config: Config, checkpoint: Checkpoint) -> CardFacts:
    """The facts for the model card. Raises CheckpointError where the config lacks one."""
    stored: Counter[str] = Counter()
    experts = {f"{module}.{part}" for module in checkpoint.expert_modules() for part in (GATE_UP, DOWN)}
    for name in experts or checkpoint.names():
        stored[checkpoint.quant(name)] += checkpoint.nbytes(name)
    try:
        return CardFacts(
            architecture=(config.architectures or [type(config).__name__])[0],
            quantization=stored.most_common(1)[0][0],
            max_position_embeddings=longest_context(config),
            vocab_size=int(config.vocab_size),
        )
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"{checkpoint.path}: the config is not complete: {error}") from error


def open_checkpoint(path: str) -> Checkpoint:
    """Open a .gguf file (of a split one: any part), a Hugging Face folder, `demo`, or `synthetic:SHAPE:QUANT[:LAYERS]`.

    Raises CheckpointError naming the file and the tensor or key at fault.
    """
    if path.startswith(SYNTHETIC_PREFIX):
        return open_synthetic(path)
    found = resolve_model(path)
    return open_folder(found) if found.is_dir() else open_gguf(found)
