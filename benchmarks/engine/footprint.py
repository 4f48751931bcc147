"""The bytes of a GGUF file that one step must read: the lower limit of its cost in memory time."""

import math
from dataclasses import dataclass
from pathlib import Path

from ktqueue.loading.gguf.checkpoint import read_parts
from ktqueue.loading.gguf.library import type_name
from ktqueue.loading.weight_formats import tensor_bytes


@dataclass(frozen=True, slots=True)
class Footprint:
    """`dense`: bytes that every step reads. `expert`: bytes of one expert, summed over the layers. `weights`: weights
    that one token meets, each a multiply-add."""

    dense: int
    expert: float
    experts: int
    experts_per_token: int
    weights: float

    def expected_experts(self, rows: int) -> float:
        """Distinct experts of a layer under `rows` rows that choose at random: E (1 - (1 - k/E)^rows)."""
        return self.experts * (1 - (1 - self.experts_per_token / self.experts) ** rows)

    def step_bytes(self, distinct_experts: float) -> float:
        """Bytes that a step reads which meets so many distinct experts in each layer."""
        return self.dense + distinct_experts * self.expert


def of_file(path: Path) -> Footprint:
    """The footprint of a Mixture-of-Experts model. Raises CheckpointError, and KeyError for a dense model."""
    parts = read_parts(path)
    metadata = parts[0].metadata
    architecture = metadata["general.architecture"]
    experts, used = (metadata[f"{architecture}.{key}"] for key in ("expert_count", "expert_used_count"))
    tensors = [info for part in parts for info in part.tensors]
    tied = all(info.name != "output.weight" for info in tensors)
    dense, expert, weights = 0, 0.0, 0.0
    for info in tensors:
        size, count = tensor_bytes(type_name(info.type_id), info.shape), math.prod(info.shape)
        if "_exps." in info.name:
            expert += size / experts
            weights += count * used / experts
        elif tied or info.name != "token_embd.weight":
            dense += size
            weights += count
    return Footprint(dense, expert, experts, used, weights)
