"""Loads the layer of a model that predicts the token after the next, once the model is loaded."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.checkpoint import Checkpoint
from ktqueue.loading.gguf.checkpoint import open_gguf
from ktqueue.loading.huggingface.checkpoint import open_folder
from ktqueue.loading.huggingface.next_tokens import layer_count
from ktqueue.loading.load import LoadedModel
from ktqueue.loading.materialize import CheckpointWeights
from ktqueue.loading.model_report import ABSORBED
from ktqueue.loading.weight_formats import loaded_format
from ktqueue.operators.decoder import CpuDecoder
from ktqueue.operators.gpu.decoder import GpuDecoder
from ktqueue.operators.gpu.next_token_layer import GpuNextTokenLayer
from ktqueue.operators.native import packed_bytes
from ktqueue.operators.next_token_layer import NextTokenLayer

_SHARED = ("embed_tokens.", "shared_head.head.")
"""Copies of the model's own weights, which are not loaded again."""


@dataclass(frozen=True, slots=True)
class LayerSize:
    """Formats and bytes of such a layer: in the file, and in memory once it is loaded.

    expert_file_bytes, expert_bytes: those of its routed experts. dense_numbers: how many other weights it has.
    """

    quants: tuple[str, ...]
    file_bytes: int
    loaded_bytes: int
    expert_file_bytes: int
    expert_bytes: int
    dense_numbers: int


def load_next_token_layer(model: LoadedModel, path: Path) -> NextTokenLayer | GpuNextTokenLayer:
    """Load the first such layer of the folder or GGUF file `path`.

    Raises CheckpointError if there is none, or a part is missing, and torch.OutOfMemoryError.
    """
    decoder = model.module
    if not isinstance(decoder, CpuDecoder | GpuDecoder):
        raise CheckpointError(f"{path}: only CpuDecoder and GpuDecoder have layers that predict further tokens")
    with _opened(path, model.config.num_hidden_layers) as checkpoint:
        try:
            return decoder.load_next_token_layer(CheckpointWeights(checkpoint, "", {}, lambda *_: None))
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{path}: the layer that predicts further tokens: {error}") from error


def next_token_layer_size(path: Path, layers: int, absorbed_bytes: int) -> LayerSize:
    """The size of what `load_next_token_layer` loads behind `layers` layers. Raises CheckpointError likewise.

    `absorbed_bytes`: those of the matrix of a layer's latent attention that is held in another form, else 0.
    """
    prefix = f"model.layers.{layers}."
    with _opened(path, layers) as checkpoint:
        names = [name for name in checkpoint.names() if name.startswith(prefix)]
        names = [name for name in names if not name.removeprefix(prefix).startswith(_SHARED)]
        experts = [name for name in names if ".experts." in name]
        return LayerSize(
            quants=tuple(sorted({checkpoint.quant(name) for name in names})),
            file_bytes=sum(map(checkpoint.nbytes, names)),
            loaded_bytes=sum(absorbed_bytes if ABSORBED in name else _loaded_bytes(checkpoint, name) for name in names),
            expert_file_bytes=sum(map(checkpoint.nbytes, experts)),
            expert_bytes=sum(_loaded_bytes(checkpoint, name) for name in experts),
            dense_numbers=sum(math.prod(checkpoint.shape(name)) for name in names if name not in experts),
        )


def _loaded_bytes(checkpoint: Checkpoint, name: str) -> int:
    shape = checkpoint.shape(name)
    if len(shape) < 2:
        return 4 * math.prod(shape)
    return math.prod(shape[:-2]) * packed_bytes(loaded_format(checkpoint.quant(name)), *shape[-2:])


@contextmanager
def _opened(path: Path, layers: int) -> Iterator[Checkpoint]:
    """The layers of a folder or a GGUF file behind the first `layers`. Raises CheckpointError if there are none."""
    checkpoint = (open_folder if path.is_dir() else open_gguf)(path, next_tokens=True)
    try:
        if not layer_count({"num_hidden_layers": layers}, checkpoint.names()):
            raise CheckpointError(f"{path} has no layer that predicts further tokens")
        yield checkpoint
    finally:
        checkpoint.close()
