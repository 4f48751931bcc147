"""Experts that are stored one by one, as the stacks that operators pack."""

from collections.abc import Mapping

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.checkpoint import CheckpointTensor
from ktqueue.operators.packed import ExpertWeights, PackedExperts


def stack_experts(source: str, module: str, parts: Mapping[str, Mapping[int, CheckpointTensor]]) -> ExpertWeights:
    """Return the experts of `module` as stacks of views. parts: the matrices of `gate`, `up` and `down` by expert.

    Raises CheckpointError, beginning with `source`, if an expert is missing or differs from the first one.
    """
    count = max(len(tensors) for tensors in parts.values())
    stacks = {}
    for part, tensors in parts.items():
        if sorted(tensors) != list(range(count)):
            missing = sorted(set(range(count)) - set(tensors))
            raise CheckpointError(f"{source}: {module}: no {part} weights for experts {missing[:8]}")
        first = tensors[0]
        if different := [t.name for t in tensors.values() if (t.quant, t.shape) != (first.quant, first.shape)]:
            raise CheckpointError(f"{source}: tensor {different[0]!r} differs in type or shape from {first.name!r}")
        if len(first.shape) != 2:
            raise CheckpointError(
                f"{source}: tensor {first.name!r} has the shape {list(first.shape)}, expected a matrix"
            )
        rows, columns = first.shape
        stacks[part] = PackedExperts(first.quant, rows, columns, [tensors[i].data for i in range(count)])
    return ExpertWeights(**stacks)
