"""Stacks of experts as operators pack them, of experts that are stored one by one or converted when they are read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import overload

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.checkpoint import CheckpointTensor
from ktqueue.loading.weight_formats import Bytes
from ktqueue.operators import native
from ktqueue.operators.packed import ExpertWeights, PackedExperts


class ConvertedExperts(Sequence[Bytes]):
    """The data of experts, each asked for whenever it is read. What is converted for it is in memory only while its
    layer is loaded. Iteration converts on all threads of the kernels, which then wait to pack."""

    def __init__(self, count: int, convert: Callable[[int], Bytes]) -> None:
        self._count = count
        self._convert = convert

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Bytes]:
        with ThreadPoolExecutor(native.threads()) as threads:
            yield from threads.map(self._convert, range(self._count))

    @overload
    def __getitem__(self, index: int) -> Bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[Bytes]: ...
    def __getitem__(self, index: int | slice) -> Bytes | list[Bytes]:
        if isinstance(index, slice):
            return [self._convert(i) for i in range(self._count)[index]]
        return self._convert(range(self._count)[index])


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
        stacks[part] = PackedExperts(first.quant, rows, columns, _data_of(tensors))
    return ExpertWeights(**stacks)


def _data_of(tensors: Mapping[int, CheckpointTensor]) -> ConvertedExperts:
    return ConvertedExperts(len(tensors), lambda expert: tensors[expert].data)
