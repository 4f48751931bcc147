"""A checkpoint as one operator sees it: the tensors below its module. Notes what is taken, so that nothing is left."""

from collections.abc import Callable, Mapping

import torch

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.checkpoint import Checkpoint
from ktqueue.loading.checkpoint_tensors import DOWN, GATE_UP
from ktqueue.operators.native import as_array
from ktqueue.operators.packed import ExpertWeights, Floats, PackedMatrix


class CheckpointWeights:
    """Implements operators.packed.ModuleWeights for the module named `module` ("": the whole model).

    `tied`: parameters that are others under a second name. `taking(name, ...)` is called with the names of the
    tensors that are about to be taken together.
    """

    def __init__(
        self, checkpoint: Checkpoint, module: str, tied: Mapping[str, str], taking: Callable[..., None]
    ) -> None:
        self._checkpoint = checkpoint
        self._prefix = f"{module}." if module else ""
        self._tied = tied
        self._taking = taking
        self._left = dict.fromkeys(
            name for name in checkpoint.names() if name.startswith(self._prefix) and name not in tied
        )
        self._names = set(checkpoint.names())
        self.newest = module  # what was taken last, for messages

    def names(self) -> list[str]:
        """Full names of the module's own tensors that are not yet taken."""
        return list(self._left)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return self._full(name) in self._names

    def matrix(self, name: str) -> PackedMatrix:
        """A two-dimensional tensor as it is stored, its rows in transformers' order. Raises CheckpointError."""
        full = self._take(name)
        return self._checkpoint.matrix(full)

    def vector(self, name: str) -> Floats:
        """A one-dimensional tensor as float32. Raises CheckpointError."""
        full = self._take(name)
        if len(shape := self._checkpoint.shape(full)) != 1:
            raise CheckpointError(f"{self._checkpoint.path}: {full} has the shape {list(shape)}, a vector is expected")
        return as_array(self._checkpoint.dense(full, torch.float32))

    def experts(self, name: str) -> ExpertWeights:
        """The routed experts of the experts module `name` ("": of this module). Raises CheckpointError."""
        module = (self._prefix + name).removesuffix(".")
        self._mark(f"{module}.{GATE_UP}", f"{module}.{DOWN}")
        return self._checkpoint.experts(module)

    def _full(self, name: str) -> str:
        full = self._prefix + name
        return self._tied.get(full, full)

    def _take(self, name: str) -> str:
        full = self._full(name)
        self._mark(full)
        return full

    def _mark(self, *names: str) -> None:
        self.newest = names[0]
        if new := [name for name in names if name in self._left]:
            self._taking(*new)
        for name in new:
            del self._left[name]
