"""Two families for ktqueue: Qwen3-MoE with a temperature of the router, and Qwen3-MoE under another name."""

from dataclasses import replace

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from ktqueue.families.family import Family, MetadataField
from ktqueue.families.qwen import QWEN3_MOE


class WarmMoeConfig(Qwen3MoeConfig):  # type: ignore[no-untyped-call]  # transformers is not typed
    model_type = "warm_moe"
    router_temperature: float = 1.0


class WarmMoeRouter(Qwen3MoeTopKRouter):
    """Divides the logits of the experts by a temperature."""

    def __init__(self, config: WarmMoeConfig) -> None:
        super().__init__(config)  # type: ignore[no-untyped-call]
        self.temperature = config.router_temperature

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return super().forward(hidden_states / self.temperature)  # type: ignore[no-untyped-call, no-any-return]


class WarmMoeForCausalLM(Qwen3MoeForCausalLM):
    config: WarmMoeConfig

    def __init__(self, config: WarmMoeConfig) -> None:
        super().__init__(config)  # type: ignore[no-untyped-call]
        for layer in self.model.layers:
            layer.mlp.gate = WarmMoeRouter(config)
        self.post_init()  # type: ignore[no-untyped-call]


class PlainMoeConfig(Qwen3MoeConfig):  # type: ignore[no-untyped-call]
    model_type = "plain_moe"


class PlainMoeForCausalLM(Qwen3MoeForCausalLM):  # type: ignore[no-untyped-call]
    config: PlainMoeConfig


WARM = replace(
    QWEN3_MOE,
    name="Warm MoE",
    model_type="warm_moe",
    class_name="WarmMoeForCausalLM",
    config=WarmMoeConfig,
    model=WarmMoeForCausalLM,
    gguf=replace(
        QWEN3_MOE.layout,
        architecture="warm-moe",
        names="qwen3moe",
        fields=(*QWEN3_MOE.layout.fields, MetadataField("router_temperature", "router_temperature", float)),
    ),
)
PLAIN = Family(
    "Plain MoE",
    "plain_moe",
    "PlainMoeForCausalLM",
    config=PlainMoeConfig,
    model=PlainMoeForCausalLM,
    decoded=True,
)
