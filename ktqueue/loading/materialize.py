"""Fills every parameter of a model on the meta device from a checkpoint, and checks that no parameter is left out."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from ktqueue.core.errors import CheckpointError, KtqueueError
from ktqueue.loading.checkpoint import BIAS, DOWN, GATE_UP, Checkpoint, Progress
from ktqueue.loading.plan import LoadPlan, is_below
from ktqueue.loading.skeleton import compute_buffers, tied_names
from ktqueue.operators.base import Operator
from ktqueue.operators.native import as_array
from ktqueue.operators.packed import ExpertWeights, Floats, PackedMatrix

MAX_NAMED = 5


def check_tensors(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Check that the untouched skeleton and the checkpoint have the same tensor names and shapes.

    Raises CheckpointError that names missing, surplus or wrongly shaped tensors.
    """
    tied = tied_names(model)
    wanted = {name: _checkpoint_shape(tensor) for name, tensor in model.state_dict().items() if name not in tied}
    present = set(checkpoint.names())
    problems = [
        *_listed("missing", sorted(map(checkpoint.stored_name, wanted.keys() - present))),
        *_listed("surplus", sorted(map(checkpoint.stored_name, present - wanted.keys()))),
        *_listed(
            "of the wrong shape",
            [
                f"{checkpoint.stored_name(name)} (stored {list(checkpoint.shape(name))}, needed {list(shape)})"
                for name, shape in wanted.items()
                if name in present and checkpoint.shape(name) != shape
            ],
        ),
    ]
    if problems:
        raise CheckpointError(f"{checkpoint.path} does not fit its model: {'; '.join(problems)}")


def materialize(
    model: nn.Module,
    skeleton: nn.Module,
    operators: Mapping[str, Operator],
    checkpoint: Checkpoint,
    plan: LoadPlan,
    progress: Progress | None = None,
) -> None:
    """Fill `model`: the `skeleton` with `operators` in it, or the one operator that replaces all of it.

    `check_tensors` must have passed. Raises CheckpointError if weights do not fit an operator, if an operator does
    not take all of them, or if a tensor stays on the meta device; and torch.OutOfMemoryError.
    """
    tied = tied_names(skeleton)
    targets = [name for name, tensor in model.state_dict().items() if tensor.is_meta and name not in tied]
    report = _ProgressReport(checkpoint, progress)
    views = {name: CheckpointWeights(checkpoint, name, tied, report.next) for name in operators}
    report.start([*targets, *(name for view in views.values() for name in view.names())])
    for name in targets:
        report.next(name)
        _fill(model, name, checkpoint, name, plan.device_of(name))
    for name, operator in operators.items():
        _load(operator, views[name], checkpoint)
    for target, source in tied.items():
        if is_below(target, operators):
            continue
        if is_below(source, operators):
            _fill(model, target, checkpoint, source, plan.device_of(target))
        else:
            parent, _, leaf = target.rpartition(".")
            model.get_submodule(parent)._parameters[leaf] = model.get_parameter(source)
    compute_buffers(model, skeleton, plan.device_of(""))
    if left := [name for name, tensor in _tensors(model) if tensor.is_meta]:
        raise CheckpointError(f"{checkpoint.path}: {'; '.join(_listed('left without a value', left))}")
    report.next()


def _checkpoint_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the tensor's shape in a checkpoint, where a number is a vector of one."""
    return tuple(tensor.shape) or (1,)


def _load(operator: Operator, weights: "CheckpointWeights", checkpoint: Checkpoint) -> None:
    try:
        operator.load(weights)
    except (KtqueueError, torch.OutOfMemoryError):  # the caller of load_prepared names the setting of the latter
        raise
    except Exception as error:  # an operator of a package can fail in any way
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise CheckpointError(f"{checkpoint.path}: {checkpoint.stored_name(weights.latest)}: {kind}{error}") from error
    if left := weights.names():
        names = [checkpoint.stored_name(name) for name in left]
        problem = "; ".join(_listed(f"not taken by {type(operator).__name__}", names))
        raise CheckpointError(f"{checkpoint.path}: {problem}")


class _ProgressReport:
    """Adds up the bytes that are loaded and passes them to `progress`."""

    def __init__(self, checkpoint: Checkpoint, progress: Progress | None) -> None:
        self._checkpoint = checkpoint
        self._progress = progress
        self._sizes: dict[str, int] = {}
        self._done = 0
        self._current = 0

    def start(self, names: list[str]) -> None:
        """Set all tensors that will be read."""
        self._sizes = {name: self._checkpoint.nbytes(name) for name in names}

    def next(self, *names: str) -> None:
        """Report that the previous tensors are loaded and that `names` come next; no names means that all are loaded.

        Pages of the file that have been read are dropped, so that a model never takes its memory twice while it is
        loaded.
        """
        self._checkpoint.release()
        self._done += self._current
        self._current = sum(self._sizes[name] for name in names)
        if self._progress:
            self._progress(self._done, sum(self._sizes.values()), names[0] if names else "")


def _fill(model: nn.Module, name: str, checkpoint: Checkpoint, source: str, device: str) -> None:
    """Set the model's tensor `name` to the value of the checkpoint's tensor `source`."""
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    if leaf in module._parameters:
        kept = module.get_parameter(leaf)
        value = checkpoint.decode(source, kept.dtype).view(kept.shape).to(device)
        module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    else:
        buffer = module.get_buffer(leaf)
        module._buffers[leaf] = checkpoint.decode(source, buffer.dtype).view(buffer.shape).to(device)


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _listed(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return [f"{what}: {', '.join(names[:MAX_NAMED])}{more}"]


class CheckpointWeights:
    """The tensors of one operator's module. It records which ones are taken, so that none is left out.

    Implements operators.packed.ModuleWeights for the module named `module`; "" is the whole model. `tied` maps
    parameters to the parameters that they repeat. `on_take(name, ...)` is called before tensors are taken together.
    """

    def __init__(
        self, checkpoint: Checkpoint, module: str, tied: Mapping[str, str], on_take: Callable[..., None]
    ) -> None:
        self._checkpoint = checkpoint
        self._prefix = f"{module}." if module else ""
        self._tied = tied
        self._on_take = on_take
        self._left = dict.fromkeys(
            name for name in checkpoint.names() if name.startswith(self._prefix) and name not in tied
        )
        self._names = set(checkpoint.names())
        self.latest = module  # the last tensor taken, for messages

    def names(self) -> list[str]:
        """Return the full names of the module's own tensors that are not taken yet."""
        return list(self._left)

    def has(self, name: str) -> bool:
        """Whether there is a tensor with that name."""
        return self._full(name) in self._names

    def matrix(self, name: str) -> PackedMatrix:
        """Return a two-dimensional tensor as stored, its rows in transformers' order. Raises CheckpointError."""
        full = self._take(name)
        return self._checkpoint.matrix(full)

    def vector(self, name: str) -> Floats:
        """Return a tensor of no matrix as float32, in its own shape, or a single row as [size].

        Raises CheckpointError.
        """
        full = self._take(name)
        shape = self._checkpoint.shape(full)
        if len(shape) == 2 and shape[0] != 1:
            raise CheckpointError(f"{self._checkpoint.path}: {full} has the shape {list(shape)}, expected a vector")
        return as_array(self._checkpoint.decode(full, torch.float32).view(shape[-1:] if len(shape) == 2 else shape))

    def experts(self, name: str) -> ExpertWeights:
        """Return the routed experts of the experts module `name` ("": of this module). Raises CheckpointError."""
        module = (self._prefix + name).removesuffix(".")
        weights = self._checkpoint.experts(module)
        endings = ("",) if weights.down.bias is None else ("", BIAS)
        self._mark(*(f"{module}.{part}{ending}" for part in (GATE_UP, DOWN) for ending in endings))
        return weights

    def _full(self, name: str) -> str:
        full = self._prefix + name
        return self._tied.get(full, full)

    def _take(self, name: str) -> str:
        full = self._full(name)
        self._mark(full)
        return full

    def _mark(self, *names: str) -> None:
        self.latest = names[0]
        if new := [name for name in names if name in self._left]:
            self._on_take(*new)
        for name in new:
            del self._left[name]
