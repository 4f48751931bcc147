"""Causal language models that transformers lacks, made of the classes of a family that computes the same."""

import transformers
from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeForCausalLM


class BailingMoeV2Config(Glm4MoeConfig):  # type: ignore[no-untyped-call]
    """Ling 2.0's, with the keys of GLM-4.5: see ling.py."""

    model_type = "bailing_moe_v2"
    use_qk_norm: bool = True
    num_mtp_layers: int = 0


class BailingMoeV2ForCausalLM(Glm4MoeForCausalLM):  # type: ignore[no-untyped-call]
    """Ling 2.0: the layers of GLM-4.5. Both choose experts within groups, and rotate a part of each head."""

    config_class = BailingMoeV2Config


def register_own_models() -> None:
    """Let transformers find these classes by their model types."""
    transformers.AutoConfig.register(BailingMoeV2Config.model_type, BailingMoeV2Config, exist_ok=True)
    transformers.AutoModelForCausalLM.register(BailingMoeV2Config, BailingMoeV2ForCausalLM, exist_ok=True)
