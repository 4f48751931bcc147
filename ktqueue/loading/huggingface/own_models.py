"""Causal language models that transformers lacks, made of classes that it has."""

from typing import Any

import torch
import transformers
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeForCausalLM
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7PreTrainedModel, Step3p7TextModel


class BailingMoeV2Config(Glm4MoeConfig):  # type: ignore[no-untyped-call]
    """Ling 2.0's, with the keys of GLM-4.5: see ling.py."""

    model_type = "bailing_moe_v2"
    use_qk_norm: bool = True
    num_mtp_layers: int = 0


class BailingMoeV2ForCausalLM(Glm4MoeForCausalLM):  # type: ignore[no-untyped-call]
    """Ling 2.0: the layers of GLM-4.5. Both choose experts within groups, and rotate a part of each head."""

    config_class = BailingMoeV2Config


class Step3p5Config(Step3p7TextConfig):  # type: ignore[no-untyped-call]
    """That of transformers, which does not tell how many query heads the layers have that state none of their own."""

    def __getattribute__(self, key: str) -> Any:
        if key == "num_attention_heads":
            return object.__getattribute__(self, key)
        return super().__getattribute__(key)  # type: ignore[no-untyped-call]


class Step3p5ForCausalLM(Step3p7PreTrainedModel):  # type: ignore[no-untyped-call]
    """Step-3.5, and the text model of Step-3.7, which transformers has only beside an encoder of images."""

    config_class = Step3p5Config

    def __init__(self, config: Step3p5Config) -> None:
        super().__init__(config)
        self._tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
        self.model = Step3p7TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self, input_ids: torch.Tensor, logits_to_keep: int | torch.Tensor = 0, **options: Any
    ) -> CausalLMOutputWithPast:
        """Return the logits of the last `logits_to_keep` tokens (0: of all), or of those with these indices."""
        hidden = self.model(input_ids, **options).last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutputWithPast(logits=self.lm_head(hidden[:, kept]))


_OWN = ((BailingMoeV2Config, BailingMoeV2ForCausalLM), (Step3p5Config, Step3p5ForCausalLM))


def register_own_models() -> None:
    """Let transformers find these classes by their model types."""
    for config, model in _OWN:
        transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
        transformers.AutoModelForCausalLM.register(config, model, exist_ok=True)
