"""Tensors of Step-3.5 and Step-3.7 folders as they are published, under the names of transformers' modules.

A matrix of all experts of a layer is one tensor there, [experts, rows, columns], and so are its scales in FP8. Source:
modeling_step3p5.py of stepfun-ai/Step-3.5-Flash. Knows no files.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.checkpoint import CheckpointTensor
from ktqueue.loading.huggingface.ling import rows_of

MODEL_TYPE = "step3p5"
_NAMES = (
    (".moe.gate.weight", ".mlp.gate.weight"),
    (".moe.router_bias", ".mlp.gate.e_score_correction_bias"),
    (".share_expert.", ".mlp.shared_experts."),
)
_EXPERTS = re.compile(r"(?P<layer>.+)\.moe\.(?P<part>(?:gate|up|down)_proj\.weight(?:_scale_inv)?)")


def step_tensors(tensors: Mapping[str, CheckpointTensor], source: str) -> dict[str, CheckpointTensor]:
    """Return the tensors by their names in transformers' modules, with those of each expert.

    source: the beginning of messages. Raises CheckpointError for a tensor of experts of other dimensions.
    """
    named: dict[str, CheckpointTensor] = {}
    for name, tensor in tensors.items():
        if match := _EXPERTS.fullmatch(name):
            if len(tensor.shape) != 3:
                raise CheckpointError(f"{source}: tensor {name!r} must be [experts, rows, columns], got {tensor.shape}")
            for expert in range(tensor.shape[0]):
                one = rows_of(tensor, expert, 1)
                module = f"{match['layer']}.mlp.experts.{expert}.{match['part']}"
                named[module] = replace(one, name=module, shape=tensor.shape[1:])
            continue
        for published, ours in _NAMES:
            name = name.replace(published, ours)
        named[name] = tensor
    return named
