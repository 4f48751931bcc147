"""Classes of transformers that our operators replace, and what cannot be read from their modules.

This is the only list of them: rules with `class: supported` and decoder_facts read it. Families of packages add theirs
when they are loaded. Knows no torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelClass:
    """A causal language model that the decoders compute.

    partly_rotated: rotary embeddings may turn only the first columns of each head. interleaved: they turn pairs of
    adjacent columns, not columns half a head apart. norm_after_rotary: query and key are normalised after their
    rotation. windows_rotated: if the model has layers with sliding windows, only those rotate. latent: the name of the
    class of its multi-head latent attention; empty: it has none.
    """

    name: str
    partly_rotated: bool = False
    interleaved: bool = False
    norm_after_rotary: bool = False
    windows_rotated: bool = False
    latent: str = ""


MODEL_CLASSES = (
    ModelClass("AXK1ForCausalLM", latent="AXK1Attention"),
    ModelClass("AfmoeForCausalLM"),
    ModelClass("DeepseekV2ForCausalLM", latent="DeepseekV2Attention"),
    ModelClass("DeepseekV3ForCausalLM", latent="DeepseekV3Attention"),
    ModelClass("DeepseekV32ForCausalLM", latent="DeepseekV32Attention"),
    ModelClass("Dots1ForCausalLM"),
    ModelClass("Ernie4_5ForCausalLM", interleaved=True),
    ModelClass("Ernie4_5_MoeForCausalLM", interleaved=True),
    ModelClass("ExaoneMoeForCausalLM", windows_rotated=True),
    ModelClass("Gemma2ForCausalLM"),
    ModelClass("Gemma3ForCausalLM"),
    ModelClass("Glm4MoeForCausalLM", partly_rotated=True),
    ModelClass("Glm4MoeLiteForCausalLM", latent="Glm4MoeLiteAttention"),
    ModelClass("GlmMoeDsaForCausalLM", latent="GlmMoeDsaAttention"),
    ModelClass("GptOssForCausalLM"),
    ModelClass("GraniteForCausalLM"),
    ModelClass("GraniteMoeForCausalLM"),
    ModelClass("HYV3ForCausalLM"),
    ModelClass("HunYuanDenseV1ForCausalLM", norm_after_rotary=True),
    ModelClass("HunYuanMoEV1ForCausalLM", norm_after_rotary=True),
    ModelClass("LlamaForCausalLM"),
    ModelClass("MiniMaxM2ForCausalLM", partly_rotated=True),
    ModelClass("Mistral4ForCausalLM", latent="Mistral4Attention"),
    ModelClass("MistralForCausalLM"),
    ModelClass("MixtralForCausalLM"),
    ModelClass("OlmoeForCausalLM"),
    ModelClass("Phi3ForCausalLM", partly_rotated=True),
    ModelClass("PhimoeForCausalLM"),
    ModelClass("Qwen2ForCausalLM"),
    ModelClass("Qwen2MoeForCausalLM"),
    ModelClass("Qwen3ForCausalLM"),
    ModelClass("Qwen3MoeForCausalLM"),
    ModelClass("Qwen3NextForCausalLM", partly_rotated=True),
    ModelClass("Qwen3_5ForCausalLM", partly_rotated=True),
    ModelClass("Qwen3_5MoeForCausalLM", partly_rotated=True),
    ModelClass("SeedOssForCausalLM"),
    ModelClass("SolarOpenForCausalLM", partly_rotated=True),
    ModelClass("YoutuForCausalLM", latent="YoutuAttention"),
)
"""Tests compare every one of them with transformers."""

BY_NAME = {entry.name: entry for entry in MODEL_CLASSES}
SUPPORTED = {
    "CpuDecoder": tuple(BY_NAME),
    "GpuDecoder": tuple(BY_NAME),
    "LatentAttention": tuple(entry.latent for entry in MODEL_CLASSES if entry.latent),
}
"""The classes that an operator replaces, by the operator's name."""


def register(entry: ModelClass) -> None:
    """Add the class of a package's family, without latent attention, for the rest of the process. Adding it again has
    no effect.

    Raises ValueError if there is another class with its name, whose modules rules could not tell apart.
    """
    if BY_NAME.setdefault(entry.name, entry) != entry:
        raise ValueError(f"there is another model class {entry.name}")
    for operator in ("CpuDecoder", "GpuDecoder"):
        if entry.name not in SUPPORTED[operator]:
            SUPPORTED[operator] = (*SUPPORTED[operator], entry.name)


def is_partly_rotated(name: str) -> bool:
    """Whether rotary embeddings of the model class `name` may turn only the first columns of each head."""
    return name in BY_NAME and BY_NAME[name].partly_rotated
