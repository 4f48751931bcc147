"""Reads KTransformers' own rules: what each of them means here, or why it cannot be followed.

Source of the form: doc/en/injection_tutorial.md and ktransformers/optimize/optimize_rules of kvcache-ai/ktransformers.
A file of theirs describes one placement: dense weights on a GPU, routed experts on the CPU. Knows no YAML.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PACKAGE = "ktransformers."
KEEP = "default"
EXPERTS = frozenset(
    ["KTransformersExperts", "KTransformersExpertsV2", "KTransformersMLPExpert", "KGlm4Experts", "KSmallthinkerExperts"]
)
LINEAR = frozenset(["KTransformersLinear", "KTransformerLinear"])
MODELS = frozenset(
    [
        "KDeepseekV2Model",
        "KQwen2MoeModel",
        "DeepseekV2ModelKTransformers",
        "DeepseekV2ModelPerLayerPrefill",
        "Qwen2MoeModelKTransformers",
        "Qwen2MoeModelPerLayerPrefill",
    ]
)
PART_OF_DECODER: dict[str, str] = {
    "attention": "KDeepseekV2Attention DeepseekV2AttentionInjected flashinfer_attn deepseek_torch_attn "
    "KQwen2MoeAttention KQwen3MoeAttention KGlm4MoeAttention",
    "Mixture-of-Experts layer": "KDeepseekV2MoE DeepseekV2MoEInjected KDeepseekV3MoE KDeepseekV3MoEV2 "
    "KMistralSparseMoEBlock MisrtalSparseMoEBlockInjected KQwen2MoeSparseMoeBlock KQwen2MoeSparseMoeBlockV2 "
    "Qwen2MoeSparseMoeBlockInjected KQwen3MoeSparseMoeBlock KQwen3MoeSparseMoeBlockV2 KGlm4MoeMoE",
    "router": "KMoEGate KMoEGateDeepSeekV3 KMoEGateQwen2Moe",
    "rotary embedding": "RotaryEmbedding RotaryEmbeddingV2 RotaryEmbeddingV3 RotaryEmbeddingV4 YarnRotaryEmbedding "
    "YarnRotaryEmbeddingV3 KQwen3MoeRotaryEmbedding KGlm4MoeRotaryEmbedding",
    "norm": "RMSNorm KQwen2MoeRMSNorm KQwen3MoeRMSNorm KGlm4MoeRMSNorm",
    "MLP": "kDeepseekV3MLP KQwen2MoeMLP KGlm4MoeMLP",
}
"""Parts that GpuDecoder computes itself, each with their classes."""
QUANTISED = frozenset(["KLinearMarlin", "VLinearMarlin", "KLinearFP8", "KLinearQ8", "QuantizedLinearMarlin"])
DECODED = frozenset(["KLinearTorch", "QuantizedLinearTorch"])
ON_CPU = frozenset(["KExpertsCPU", "MLPCPUExperts"])
STREAMED = frozenset(["KExpertsTorch", "MLPExpertsTorch"])
DEVICES = ("replace.device", "kwargs.generate_device", "kwargs.prefill_device", "kwargs.out_device")
_COMMON = ("generate_device", "prefill_device", "out_device")
_KNOWN: dict[str, tuple[str, ...]] = {
    "experts": (
        *(*_COMMON, "generate_op", "prefill_op", "generate_mlp_type", "prefill_mlp_type"),
        *("backend", "n_deferred_experts"),
    ),
    "linear": (*_COMMON, "generate_op", "prefill_op", "num_bits"),
    "model": (*_COMMON, "per_layer_prefill_intput_threshold", "transfer_map"),
    "attention": (*_COMMON, "absorb_for_prefill"),
}
_CLASSES = {name: part for part, names in PART_OF_DECODER.items() for name in names.split()}


@dataclass(frozen=True, slots=True)
class KTransformersRule:
    """One rule of theirs. `fields` maps "match.name", "replace.class", "kwargs.generate_op" ... to line and value."""

    line: int
    fields: Mapping[str, tuple[int, Any]]

    def value(self, key: str) -> Any:
        """Return the value of a key, or None."""
        return self.fields.get(key, (0, None))[1]

    def text(self, key: str) -> str | None:
        """Return the value of a key as text, or None."""
        return None if (value := self.value(key)) is None else str(value)


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a rule of theirs means here. `line` is its first line, `operator` the last part of their class name."""

    line: int
    operator: str
    text: str


@dataclass(frozen=True, slots=True)
class Placement:
    """What a whole file of theirs means. `dense`: GpuDecoder's option. `on_gpu`: whether the model must be on a GPU.

    `refusals` are lines with the reason why they cannot be followed. `meanings` are those of the other rules.
    """

    dense: str
    on_gpu: bool
    meanings: list[Meaning]
    refusals: list[tuple[int, str]]


def has_ktransformers_form(classes: Sequence[Any]) -> bool:
    """Whether a list of rules with these `replace.class` values has KTransformers' form: a class without a colon."""
    return any(isinstance(name, str) and (name == KEEP or name.startswith(PACKAGE)) for name in classes)


def read_placement(rules: Sequence[KTransformersRule]) -> Placement:
    """Return the meaning of all rules of a file."""
    refusals: list[tuple[int, str]] = []
    meanings: list[Meaning] = []
    dense: dict[str, int] = {}
    on_gpu = False
    for rule in rules:
        path = str(rule.value("replace.class"))
        name = path.rpartition(".")[2]
        before = len(refusals)

        def refuse(key: str, why: str, rule: KTransformersRule = rule, before: int = before) -> None:
            if all(why != said for _, said in refusals[before:]):  # devices repeat in one rule
                refusals.append((rule.fields.get(key, (rule.line, None))[0], why))

        kind = _kind(path, name)
        _check_keys(rule, kind, refuse)
        if kind is None:
            refuse("replace.class", _unknown(path))
            continue
        is_experts = kind == "experts"
        is_embedding = path == KEEP and "embed_tokens" in str(rule.value("match.name"))
        may_be_on_cpu = is_experts or is_embedding or _is_head_of_gpu_kernel(rule, kind)
        on_gpu |= _check_devices(rule, refuse, may_be_on_cpu=may_be_on_cpu)
        text = _meaning(rule, kind, refuse, dense, is_embedding=is_embedding)
        if len(refusals) == before:
            meanings.append(Meaning(rule.line, name, text))
    if len(dense) > 1:
        (first, line), (second, other) = sorted(dense.items(), key=lambda item: item[1])[:2]
        refusals.append(
            (other, f"dense weights are {second} here and {first} in line {line}, but are alike in a model")
        )
    return Placement(next(iter(dense), "dequantised"), on_gpu, meanings, sorted(refusals))


def _kind(path: str, name: str) -> str | None:
    if path == KEEP:
        return KEEP
    if not path.startswith(f"{PACKAGE}operators."):
        return None
    for kind, names in (("experts", EXPERTS), ("linear", LINEAR), ("model", MODELS)):
        if name in names:
            return kind
    return _CLASSES.get(name)


def _unknown(path: str) -> str:
    if path.startswith(PACKAGE):
        return f"ktqueue has no operator like {path}"
    if ":" in path:
        return f"{path}: a file has either rules of KTransformers or those of ktqueue"
    return (
        f"{path} is built as KTransformers builds operators (key, gguf_loader, config, orig_module), which ktqueue "
        "does not do; write class: package.module:Class, see docs/guides/operators.md"
    )


def _check_keys(rule: KTransformersRule, kind: str | None, refuse: Callable[[str, str], None]) -> None:
    for key, (_, value) in rule.fields.items():
        group, _, name = key.rpartition(".")
        if group == "kwargs":
            if kind is not None and name not in _KNOWN.get(kind, _COMMON):
                refuse(key, f"unknown argument {name!r} of {str(rule.value('replace.class')).rpartition('.')[2]}")
        elif key not in ("match.name", "match.class", "replace.class", "replace.device", "recursive"):
            refuse(key, f"unknown key {name!r} of a KTransformers rule")
        elif key == "match.name":
            try:
                re.compile(str(value))
            except re.error as error:
                refuse(key, f"name is not a regular expression: {error}")
        elif key == "recursive" and not isinstance(value, bool):
            refuse(key, f"recursive must be true or false, got {value!r}")
    if rule.value("match.name") is None and rule.value("match.class") is None:
        refuse("", "match needs name or class")


def _check_devices(rule: KTransformersRule, refuse: Callable[[str, str], None], *, may_be_on_cpu: bool) -> bool:
    """Refuse devices that a worker does not have. Returns whether the rule names a GPU."""
    named = False
    for key in DEVICES:
        device = rule.value(key)
        if device in ("cuda", "cuda:0"):
            named = True
        elif device == "cpu" and not may_be_on_cpu:
            refuse(key, "only routed experts are on the CPU beside a GPU, but this module would be there")
        elif isinstance(device, str) and re.fullmatch(r"cuda:\d+", device):
            refuse(key, f"{device}: a worker serves on one GPU; layers are not spread over several")
        elif device not in (None, "cpu"):
            refuse(key, f"ktqueue has no device {device!r}; it has cpu and cuda")
    return named


def _is_head_of_gpu_kernel(rule: KTransformersRule, kind: str) -> bool:
    """Whether the rule has the head on the CPU with a kernel that only a GPU has, as a file for DeepSeek-V2-Lite does.

    The head is on the GPU then.
    """
    return (
        kind == "linear"
        and "lm_head" in str(rule.value("match.name"))
        and rule.text("kwargs.generate_op") in ("KLinearMarlin", "VLinearMarlin", "QuantizedLinearMarlin")
        and rule.value("kwargs.prefill_device") == "cuda"
    )


def _meaning(
    rule: KTransformersRule, kind: str, refuse: Callable[[str, str], None], dense: dict[str, int], *, is_embedding: bool
) -> str:
    if kind == "experts":
        return _experts(rule, refuse)
    if kind == "linear":
        return _linear(rule, refuse, dense)
    if kind == "model":
        if rule.value("kwargs.transfer_map"):
            refuse(
                "kwargs.transfer_map", "transfer_map: a worker serves on one GPU; layers are not spread over several"
            )
        return "not used: --expert-streaming decides in each step whether experts are copied to the GPU"
    if is_embedding:
        return "not used: GpuDecoder has embeddings on the GPU"
    if kind == KEEP:
        return "not used: the device is that of the model"
    return f"the {kind} of GpuDecoder"


def _experts(rule: KTransformersRule, refuse: Callable[[str, str], None]) -> str:
    def op(phase: str) -> tuple[str, str | None]:
        keys = (f"kwargs.{phase}_op", f"kwargs.{phase}_mlp_type")
        return next(((key, rule.text(key)) for key in keys if key in rule.fields), (keys[0], None))

    key, generate = op("generate")
    if rule.value("kwargs.generate_device") not in (None, "cpu") or generate == "KExpertsMarlin":
        refuse("kwargs.generate_device", "experts are in GPU memory by --gpu-expert-memory SIZE, not by rule")
    elif generate is not None and generate not in ON_CPU:
        refuse(key, f"ktqueue has no operator like {generate} for experts on the CPU")
    key, prefill = op("prefill")
    if deferred := rule.value("kwargs.n_deferred_experts"):
        refuse("kwargs.n_deferred_experts", f"n_deferred_experts {deferred}: ktqueue defers none, see adr/0031")
    kept = ", in the type of the file" if rule.text("kwargs.backend") else ""
    if prefill in STREAMED and rule.value("kwargs.prefill_device") != "cpu":
        return f"experts on the CPU{kept}; a long step copies them to the GPU (--expert-streaming auto)"
    if prefill not in (None, "None", *STREAMED, *ON_CPU):
        refuse(key, f"ktqueue has no operator like {prefill} for experts in prefill")
    return f"experts on the CPU{kept}, also in prefill if you start with --expert-streaming off"


def _linear(rule: KTransformersRule, refuse: Callable[[str, str], None], dense: dict[str, int]) -> str:
    generate, prefill = rule.text("kwargs.generate_op"), rule.text("kwargs.prefill_op")
    if generate in QUANTISED:
        form = "quantised"
    elif generate in (None, *DECODED):
        form = "dequantised"
    else:
        refuse("kwargs.generate_op", f"ktqueue has no operator like {generate}")
        return ""
    if prefill not in (None, *QUANTISED, *DECODED):
        refuse("kwargs.prefill_op", f"ktqueue has no operator like {prefill}")
    dense.setdefault(form, rule.line)
    return f"GpuDecoder with dense: {form}"
