"""Fills every parameter of a model on the meta device from a checkpoint, and asserts that nothing is left out."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.checkpoint import Checkpoint
from ktqueue.loading.plan import Plan
from ktqueue.loading.skeleton import compute_buffers, tied_names
from ktqueue.loading.stored import DOWN, GATE_UP
from ktqueue.operators.base import Operator

Progress = Callable[[int, int, str], None]  # bytes done, bytes in all, name of what comes next
MAX_NAMED = 5


def check(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Compare the untouched skeleton with the checkpoint: same names, same shapes.

    Raises CheckpointError naming the tensors that are missing, surplus or wrongly shaped.
    """
    tied = tied_names(model)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}
    present = set(checkpoint.names()) - tied.keys()  # a second copy of a tied tensor is never read
    problems = [
        *_listed("missing", sorted(wanted.keys() - present)),
        *_listed("surplus", sorted(present - wanted.keys())),
        *_listed(
            "of the wrong shape",
            [
                f"{name} (stored {list(checkpoint.shape(name))}, needed {list(shape)})"
                for name, shape in wanted.items()
                if name in present and checkpoint.shape(name) != shape
            ],
        ),
    ]
    if problems:
        raise CheckpointError(f"{checkpoint.path} does not fit its model: {'; '.join(problems)}")


def materialize(
    model: nn.Module,
    operators: Mapping[str, Operator[Any]],
    checkpoint: Checkpoint,
    plan: Plan,
    progress: Progress | None = None,
) -> None:
    """Fill `model`, whose modules `operators` have been put in. `check` must have passed.

    Raises CheckpointError where weights do not fit an operator or a tensor is left on the meta device.
    """
    tied = tied_names(model)
    targets = [name for name, tensor in model.state_dict().items() if tensor.is_meta and name not in tied]
    report = _Report(checkpoint, targets, operators, progress)
    for name in targets:
        report.next(name)
        _fill(model, name, checkpoint, plan.device_of(name))
    for name, operator in operators.items():
        report.next(name)
        try:
            operator.load(checkpoint.experts(name))
        except ValueError as error:
            raise CheckpointError(f"{checkpoint.path}: {name}: {error}") from error
    for target, source in tied.items():
        parent, _, leaf = target.rpartition(".")
        model.get_submodule(parent)._parameters[leaf] = model.get_parameter(source)
    compute_buffers(model, plan.device_of(""))
    if left := [name for name, tensor in _tensors(model) if tensor.is_meta]:
        raise CheckpointError(f"{checkpoint.path}: {'; '.join(_listed('left without a value', left))}")
    report.next("")


class _Report:
    """Adds up the bytes of what is done and tells `progress`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        targets: list[str],
        operators: Mapping[str, Operator[Any]],
        progress: Progress | None,
    ) -> None:
        self._sizes = {name: checkpoint.nbytes(name) for name in targets}
        for name in operators:
            self._sizes[name] = sum(checkpoint.nbytes(f"{name}.{part}") for part in (GATE_UP, DOWN))
        self._total = sum(self._sizes.values())
        self._done = 0
        self._current = 0
        self._progress = progress

    def next(self, name: str) -> None:
        """The one before is done, `name` comes next; an empty name: all is done."""
        self._done += self._current
        self._current = self._sizes.get(name, 0)
        if self._progress:
            self._progress(self._done, self._total, name)


def _fill(model: nn.Module, name: str, checkpoint: Checkpoint, device: str) -> None:
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    if leaf in module._parameters:
        kept = module.get_parameter(leaf)
        value = checkpoint.dense(name, kept.dtype).to(device)
        module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    else:
        module._buffers[leaf] = checkpoint.dense(name, module.get_buffer(leaf).dtype).to(device)


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _listed(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return [f"{what}: {', '.join(names[:MAX_NAMED])}{more}"]
