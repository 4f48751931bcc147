"""Routing traces: synthetic weights whose routers choose the experts that a trained model chose.

Uniform routing hides what it is worth to keep the experts that are used most. So a file with the choices of a trained
model, token by token, can be built into the weights, and any engine then follows it.

The last R dimensions of the residual, the *track*, are kept free: no layer writes to them, so they carry the embedding
of the token through all layers. There the embedding of token t is one number at place t % R. A router reads the track
alone: for each place it has the experts of one token of the trace. The logits read it too, and the next place is by far
the likeliest, so a sequence walks along the trace. Pure.
"""

import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.quantize import quantize
from ktqueue.loading.synthetic.shapes import RESIDUAL_GAINS, ROUTER, SyntheticTensor
from ktqueue.loading.weight_formats import BLOCKS, Bytes

MOST_EXPERTS = 1 << 16
SEGMENT = 128  # tokens that follow each other in the trace; then comes another sequence
EMBEDDED = 16.0  # where an activation's other dimensions have a standard deviation of about 1
NEXT = 4.0  # weight of the logit of the next place; random logits have a standard deviation of 3
CHOSEN = 0.4  # weight of the most used expert of a token, falling to half of that for the last one
Weights = Callable[[SyntheticTensor], Bytes]
Float = npt.NDArray[np.float32]
Experts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RoutingTrace:
    """The experts of `choices`, [places, layers, chosen] int64, in order of weight. Each place is a token."""

    choices: Experts

    @classmethod
    def read(cls, path: Path, places: int) -> Self:
        """Read `places` tokens of a file. See read_trace.

        They are from sequences far apart, SEGMENT tokens of each. Raises CheckpointError.
        """
        arrays = read_trace(path)
        length = min((array.shape[1] for array in arrays), default=0)
        taken = min(SEGMENT, length)
        count = -(-places // max(1, taken))
        sequences = [sequence for array in arrays for sequence in array]
        if not taken or count > len(sequences):
            have = len(sequences) * taken
            raise CheckpointError(f"{path}: a trace of {places} tokens is needed, in parts of {SEGMENT}; it has {have}")
        start = (length - taken) // 2
        chosen = [sequences[place * len(sequences) // count][start : start + taken] for place in range(count)]
        return cls(np.concatenate(chosen)[:places].astype(np.int64))

    def check(self, experts: int, chosen: int, path: Path) -> None:
        """Raise CheckpointError if a model of so many experts, so many of them chosen, cannot follow the trace."""
        most, width = int(self.choices.max()) + 1, self.choices.shape[2]
        if most > experts or chosen > width:
            raise CheckpointError(
                f"{path}: a token of it has {width} of {most} experts, but one of the model has {chosen} of {experts}"
            )

    def router(self, index: int, experts: int, chosen: int) -> Float:
        """The weights [experts, places] of the router of the routed layer with that index, which read the track.

        A model with more layers than the trace repeats the trace's layers with other numbers of experts.
        """
        layers = self.choices.shape[1]
        repeat, layer = divmod(index, layers)
        numbers = np.random.default_rng(repeat).permutation(experts) if repeat else np.arange(experts)
        weights = np.zeros((experts, len(self.choices)), np.float32)
        for rank in range(chosen):
            weights[numbers[self.choices[:, layer, rank]], np.arange(len(self.choices))] = CHOSEN * (
                1 - rank / (2 * chosen)
            )
        return weights


def read_trace(path: Path) -> list[npt.NDArray[Any]]:
    """The arrays of a .npz file: [sequences, tokens, layers, chosen] of whole numbers, a token's experts in order of
    weight. Raises CheckpointError."""
    try:
        zipfile.ZipFile(path).close()  # numpy takes any other file for a pickle
        with np.load(path, allow_pickle=False) as file:
            arrays = [file[name] for name in file.files]
    except (OSError, ValueError, RuntimeError, MemoryError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise CheckpointError(f"{path}: this is no .npz file of routing: {error}") from error
    for array in arrays:
        if not isinstance(array, np.ndarray):  # a member that is no array
            raise CheckpointError(f"{path}: this is no .npz file of routing: it has other files too")
        sizes = array.shape[2:]
        if array.ndim != 4 or array.dtype.kind not in "iu" or 0 in sizes or sizes != arrays[0].shape[2:]:
            wanted = "all arrays of a routing trace are [sequences, tokens, layers, chosen] of whole numbers"
            raise CheckpointError(f"{path}: {wanted}, got {array.dtype} {list(array.shape)}")
        if array.size and not 0 <= int(array.min()) <= int(array.max()) < MOST_EXPERTS:
            found = f"{array.min()} to {array.max()}"
            raise CheckpointError(f"{path}: experts have numbers from 0 to {MOST_EXPERTS - 1}, got {found}")
    return arrays


class RoutedWeights:
    """The weights of `tensors` so that they follow the trace of a file: a function from a tensor to its bytes.

    `weights` makes the random ones. The places of the trace are as many as the track is wide: half of the hidden size,
    in whole blocks. Raises CheckpointError if the model cannot follow the trace.
    """

    def __init__(
        self, config: dict[str, Any], tensors: Sequence[SyntheticTensor], path: Path, weights: Weights
    ) -> None:
        self._weights = weights
        self._hidden = hidden = int(config["hidden_size"])
        by_role = {tensor.role: tensor for tensor in tensors}
        routers = [tensor for tensor in tensors if tensor.role == ROUTER and len(tensor.shape) == 2]
        if not routers or "output" not in by_role:
            raise CheckpointError(f"{path}: a model without routers, or with tied embeddings, follows no trace")
        block = max(BLOCKS[by_role[role].quant][0] for role in ("token_embd", "output"))
        self._width = width = hidden // 2 // block * block
        if not width:
            raise CheckpointError(f"{path}: a trace needs a hidden size of at least {2 * block}, got {hidden}")
        experts, chosen = routers[0].shape[0], int(config["num_experts_per_tok"])
        self._trace = RoutingTrace.read(path, width)
        self._trace.check(experts, chosen, path)
        self._chosen = chosen
        self._layers = {tensor.name: index for index, tensor in enumerate(routers)}

    def __call__(self, tensor: SyntheticTensor) -> Bytes:
        """The bytes of a tensor."""
        if tensor.name in self._layers:
            weights = np.zeros(tensor.shape, np.float32)
            track = self._trace.router(self._layers[tensor.name], tensor.shape[0], self._chosen)
            weights[:, -self._width :] = track
            return quantize(weights, tensor.quant).reshape(-1)
        if tensor.role == "token_embd":
            return self._with_track(tensor, np.arange(self._width), EMBEDDED)
        if tensor.role == "output":
            return self._with_track(tensor, np.arange(-1, self._width - 1) % self._width, NEXT)
        found = self._weights(tensor)
        return self.without_track(tensor, found) if tensor.role in RESIDUAL_GAINS else found

    def without_track(self, tensor: SyntheticTensor, weights: Bytes) -> Bytes:
        """A copy of a matrix, or bias, that adds nothing to the track. In all formats bytes of 0 are weights of 0."""
        row = len(weights) // (_matrices(tensor, self._hidden) * self._hidden)
        outputs = weights.copy().reshape(-1, self._hidden, row)
        outputs[:, -self._width :] = 0
        return outputs.reshape(-1)

    def _with_track(self, tensor: SyntheticTensor, places: Experts, value: float) -> Bytes:
        """A matrix [vocabulary, hidden] whose row t has `value` at `places[t % width]` of the track alone."""
        rows = tensor.shape[0]
        marks = np.zeros((self._width, self._width), np.float32)
        marks[np.arange(self._width), places] = value
        packed = quantize(marks, tensor.quant).reshape(self._width, -1)
        found = self._weights(tensor).reshape(rows, -1)
        found[:, -packed.shape[1] :] = packed[np.arange(rows) % self._width]
        return found.reshape(-1)


def _matrices(tensor: SyntheticTensor, hidden: int) -> int:
    """How many matrices, or vectors, with `hidden` outputs a tensor has."""
    experts = len(tensor.shape) == 3 or (len(tensor.shape) == 2 and tensor.shape[0] != hidden)
    return tensor.shape[0] if experts else 1
