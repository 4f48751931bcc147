"""One face for all model files: which parameters there are, and how to get at them."""

from typing import Any, Protocol

import torch

from ktqueue.loading.gguf.checkpoint import open_gguf
from ktqueue.loading.huggingface.checkpoint import open_folder
from ktqueue.loading.model_path import resolve_model
from ktqueue.loading.synthetic.checkpoint import PREFIX, open_synthetic
from ktqueue.operators.packed import ExpertWeights, PackedMatrix


class Checkpoint(Protocol):
    """A model's config and weights. Names are those of the transformers module tree."""

    path: str

    def config(self) -> dict[str, Any]: ...

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def quant(self, name: str) -> str: ...

    def nbytes(self, name: str) -> int: ...

    def dense(self, name: str, dtype: torch.dtype) -> torch.Tensor: ...

    def matrix(self, name: str) -> PackedMatrix: ...

    def experts(self, module: str) -> ExpertWeights: ...

    def alike(self, name: str, other: str) -> bool: ...

    def leave_out(self, name: str) -> None: ...

    def expert_modules(self) -> list[str]: ...

    def release(self) -> None: ...

    def close(self) -> None: ...


def open_checkpoint(path: str) -> Checkpoint:
    """Open a .gguf file (of a split one: any part), a Hugging Face folder, `demo`, or `synthetic:SHAPE:QUANT[:LAYERS]`.

    Raises CheckpointError naming the file and the tensor or key at fault.
    """
    if path.startswith(PREFIX):
        return open_synthetic(path)
    found = resolve_model(path)
    return open_folder(found) if found.is_dir() else open_gguf(found)
