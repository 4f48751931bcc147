"""Importance matrices weight the errors of the converter, and files that do not fit a model are refused by name."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import safetensors.torch
from checkpoint_files import finish

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.convert import convert
from ktqueue.loading.gguf.importance import ImportanceMatrix


def write_importance(path: Path, tensors: dict[str, npt.NDArray[Any]], kind: str = "imatrix") -> Path:
    """Write the tensors as llama-imatrix does."""
    writer = gguf.GGUFWriter(path, "")
    writer.add_string("general.type", kind)
    for name, values in tensors.items():
        writer.add_tensor(name, values.astype(np.float32))
    finish(writer)
    return path


UP = "blk.0.ffn_up_exps.weight"


def importance_of(experts: int = 8, columns: int = 64, counts: float = 4) -> dict[str, npt.NDArray[Any]]:
    sums = np.random.default_rng(6).lognormal(sigma=2, size=(experts, columns))
    return {f"{UP}.in_sum2": sums, f"{UP}.counts": np.full((experts, 1), counts)}


def test_an_importance_matrix_weights_the_errors_of_each_expert(tiny: Path, tmp_path: Path) -> None:
    tensors = importance_of()
    tensors[f"{UP}.counts"][3] = 0  # which no token chose
    errors = []
    wanted = safetensors.torch.load_file(tiny / "model.safetensors")
    up = np.stack([wanted[f"model.layers.0.mlp.experts.{i}.up_proj.weight"].float().numpy() for i in range(8)])
    for file in (None, write_importance(tmp_path / "imatrix.gguf", tensors)):
        convert(tiny, tmp_path / "model.gguf", experts="q4_0", importance=file)
        (found,) = [tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors if tensor.name == UP]
        squares = np.square(gguf.dequantize(found.data, found.tensor_type) - up)
        errors.append((squares * tensors[f"{UP}.in_sum2"][:, None]).sum((1, 2)))
    ratio = errors[1] / errors[0]
    assert ratio[3] == 1 and (np.delete(ratio, 3) < 0.95).all()


@pytest.mark.parametrize(
    ("tensors", "kind", "words"),
    [
        (importance_of(), "model", "not an importance matrix: general.type is 'model'"),
        (importance_of(experts=7), "imatrix", r"has \[7, 64\] numbers, but the model needs \[8, 64\]"),
        (importance_of(columns=32), "imatrix", r"has \[8, 32\] numbers, but the model needs \[8, 64\]"),
        ({"x.in_sum2": np.ones(64), "x.counts": np.ones(1)}, "imatrix", "'x' is not a tensor of this model"),
        ({f"{UP}.in_sum2": np.ones((8, 64))}, "imatrix", "needs in_sum2 and counts for the same experts"),
        ({**importance_of(), f"{UP}.counts": np.ones((2, 1))}, "imatrix", "needs in_sum2 and counts for the same"),
        ({**importance_of(counts=-1)}, "imatrix", "counts' must hold finite F32 numbers, none below 0"),
        ({f"{UP}.in_sum2": np.full(64, np.nan), f"{UP}.counts": np.ones(1)}, "imatrix", "must hold finite F32"),
    ],
)
def test_an_importance_matrix_that_does_not_fit_is_refused(
    tensors: dict[str, npt.NDArray[Any]], kind: str, words: str, tiny: Path, tmp_path: Path
) -> None:
    file = write_importance(tmp_path / "imatrix.gguf", tensors, kind)
    with pytest.raises(CheckpointError, match=words):
        convert(tiny, tmp_path / "model.gguf", mix="q4_k_m", importance=file)
    assert not list(tmp_path.glob("model.gguf*"))


def test_parts_of_a_matrix_that_is_written_whole_may_be_in_an_importance_matrix() -> None:
    """llama.cpp's files of DeepSeek have attn_k_b and attn_v_b, which are one matrix in ours."""
    matrix = ImportanceMatrix("x.gguf", {"blk.0.attn_k_b.weight": np.ones((4, 16), np.float32)})
    matrix.check({"blk.0.attn_kv_b.weight": (128, 32)})
    with pytest.raises(CheckpointError, match=r"'blk\.0\.attn_k_b\.weight' is not a tensor of this model"):
        matrix.check({"blk.0.attn_q.weight": (128, 32)})
