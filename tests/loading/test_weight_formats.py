"""GGUF files in every weight format: values, the bytes that reach the experts, and errors for damaged files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.checkpoint import decode_rows, requantise_matrix
from ktqueue.loading.gguf.checkpoint import _file_tensors
from ktqueue.loading.gguf.header import GgufHeader, TensorInfo, read_header
from ktqueue.loading.gguf.writer import GgufWriter
from ktqueue.loading.load import load_model, open_checkpoint
from ktqueue.loading.model_report import report_model
from ktqueue.loading.rules import DEFAULT_RULES
from ktqueue.loading.weight_formats import BLOCKS, FILE_BLOCKS, loaded_format, requantise, row_bytes, tensor_bytes
from ktqueue.operators import native

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
EXPERTS = "model.layers.1.mlp.experts"
NEW_QUANTS = ("Q1_0", "Q2_0", "Q2_0_128")
LIBRARY_QUANTS = [quant for quant in FILE_BLOCKS if quant not in NEW_QUANTS]  # that the gguf library decodes
BLOCK_QUANTS = [quant for quant in LIBRARY_QUANTS if FILE_BLOCKS[quant][0] > 1]


@pytest.fixture(scope="module")
def wide_gguf(make_gguf: Callable[..., Path]) -> Path:
    """A float32 file whose rows are whole blocks of every format."""
    return make_gguf(hidden_size=256, moe_intermediate_size=256, head_dim=64)


@pytest.fixture
def rewrite(
    wide_gguf: Path, random_weights: Callable[..., Bytes], tmp_path: Path
) -> Callable[[str], tuple[Path, dict[str, Bytes]]]:
    """rewrite(quant) -> a copy of that file with all matrices random in `quant`, and their bytes by GGUF name.

    Most formats are ones that the gguf library cannot quantise to.
    """

    def make(quant: str) -> tuple[Path, dict[str, Bytes]]:
        header, target, made = read_header(wide_gguf), tmp_path / "model.gguf", {}
        with GgufWriter(target, "qwen3moe", "F32") as writer:
            writer.add_metadata({k: v for k, v in header.metadata.items() if not k.startswith("general.")})
            for info in header.tensors:
                writer.add_tensor(info.name, quant if len(info.shape) > 1 else "F32", info.shape)
            writer.start()
            for seed, info in enumerate(header.tensors):
                count = int(np.prod(info.shape))
                if len(info.shape) > 1:
                    made[info.name] = random_weights(quant, count, seed)
                    writer.write(made[info.name])
                else:
                    writer.write(header.data[info.offset : info.offset + 4 * count])
        return target, made

    return make


def test_loading_and_kernels_have_the_same_formats() -> None:
    assert tuple(BLOCKS) == native.QUANTS
    assert [row_bytes(q, 256) for q in native.QUANTS] == [native.row_bytes(q, 256) for q in native.QUANTS]


@pytest.mark.parametrize("quant", LIBRARY_QUANTS)
def test_values_are_those_of_the_gguf_library(quant: str, rewrite: Callable[..., Any]) -> None:
    path, made = rewrite(quant)
    checkpoint = open_checkpoint(str(path))
    for name, stored in (
        (f"{EXPERTS}.down_proj", "ffn_down_exps"),
        ("model.layers.1.self_attn.q_proj.weight", "attn_q"),
    ):
        expected = gguf.quants.dequantize(made[f"blk.1.{stored}.weight"], gguf.GGMLQuantizationType[quant])
        got = checkpoint.decode(name, torch.float32).numpy().ravel()
        np.testing.assert_array_equal(got.view(np.uint32), expected.ravel().view(np.uint32))
        assert checkpoint.quant(name) == quant


@pytest.mark.parametrize("quant", LIBRARY_QUANTS)
def test_a_model_of_one_format_loads_and_runs(
    quant: str, rewrite: Callable[..., Any], run_logits: Callable[..., torch.Tensor]
) -> None:
    path, made = rewrite(quant)
    packed = open_checkpoint(str(path)).experts(EXPERTS)
    for part in ("gate", "up", "down"):
        stack = getattr(packed, part)
        assert stack.quant == loaded_format(quant)
        stored = requantise(quant, made[f"blk.1.ffn_{part}_exps.weight"])
        np.testing.assert_array_equal(np.concatenate(stack.data), stored)
    model = load_model(str(path))
    assert type(model.module).__name__ == "CpuDecoder"
    assert model.card_facts.quantization == quant
    logits = run_logits(model.module, model.kv_layout(16), list(range(3, 20)))
    assert logits.isfinite().all() and logits.std() > 0
    report = report_model(str(path))
    (experts,) = [row for row in report.rows if row.name.endswith("experts")]
    assert experts.quants == (quant,) and report.facts.quantization == quant
    assert experts.file_bytes == 2 * 8 * 3 * 256 * row_bytes(quant, 256)
    kept = 2 * 8 * 2 * 256 * native.row_bytes(loaded_format(quant), 256)
    assert experts.device_bytes >= kept


@pytest.mark.parametrize("quant", LIBRARY_QUANTS)
def test_every_matrix_in_a_format_computes_as_decoded(
    quant: str, rewrite: Callable[..., Any], run_logits: Callable[..., torch.Tensor], tmp_path: Path
) -> None:
    """Embeddings, projections, router, experts and head have that format. Activations are not rounded."""
    path, _ = rewrite(quant)
    keep = tmp_path / "keep.yaml"
    keep.write_text("- match: {class: 'ForCausalLM$'}\n  replace: {op: default}\n")
    model = load_model(str(path), rules=str(DEFAULT_RULES.with_name("exact.yaml")))
    twin = load_model(str(path), rules=str(keep))
    expected = run_logits(twin.module, twin.kv_layout(16), list(range(3, 20)))
    found = run_logits(model.module, model.kv_layout(16), list(range(3, 20)))
    assert (found - expected).abs().max() < 5e-5 * expected.abs().max()


@pytest.mark.parametrize("quant", BLOCK_QUANTS)
def test_a_file_that_ends_inside_the_last_block_is_refused(quant: str, rewrite: Callable[..., Any]) -> None:
    path, _ = rewrite(quant)
    last = max(read_header(path).tensors, key=lambda info: info.offset)
    end = last.offset + tensor_bytes(quant if len(last.shape) > 1 else "F32", last.shape)
    path.write_bytes(path.read_bytes()[: end - 1])
    with pytest.raises(CheckpointError, match=rf"model.gguf: tensor '{last.name}' needs bytes .* truncated or corrupt"):
        load_model(str(path))


@pytest.mark.parametrize("quant", BLOCK_QUANTS)
def test_rows_that_are_not_whole_blocks_are_refused(quant: str, make_gguf: Callable[..., Path], tmp_path: Path) -> None:
    raw = bytearray(make_gguf(moe_intermediate_size=48).read_bytes())
    name = b"blk.0.ffn_down_exps.weight"
    position = raw.index(name) + len(name) + 4 + 24  # dimension count, three dimensions
    assert raw[position : position + 4] == bytes(4)
    raw[position] = int(gguf.GGMLQuantizationType[quant])
    path = tmp_path / "odd.gguf"
    path.write_bytes(raw)
    words = rf"'{name.decode()}': a row of 48 is not a multiple of the {quant} block of {FILE_BLOCKS[quant][0]}"
    with pytest.raises(CheckpointError, match=rf"odd.gguf: tensor {words}"):
        load_model(str(path))


@pytest.mark.parametrize(("type_id", "quant"), [(41, "Q1_0"), (42, "Q2_0"), (42, "Q2_0_128")])
def test_codes_of_one_and_two_bits_equal_their_formula(type_id: int, quant: str) -> None:
    """Q1_0 is d for a bit that is set, else -d. Q2_0 is d * (code - 1), for 64 columns, or for 128 in a fork."""
    columns, size = FILE_BLOCKS[quant]
    blocks = np.random.default_rng(3).integers(0, 256, (2, 6 * 256 // columns, size), np.uint8)
    blocks[..., 1] = 0x2C  # scales of about 0.06
    shape, one = (6, 256), blocks[0].size
    infos = [TensorInfo("a", shape, type_id, 0), TensorInfo("b", shape, type_id, one)]
    tensors = _file_tensors(
        Path("file"), [GgufHeader(Path("file"), {"general.alignment": 8}, infos, blocks.reshape(-1))]
    )
    if quant == "Q2_0":  # its last byte is missing
        with pytest.raises(CheckpointError, match=r"'b' needs bytes .* truncated"):
            _file_tensors(Path("file"), [GgufHeader(Path("file"), {}, infos, blocks.reshape(-1)[:-1])])
    if quant == "Q2_0_128":  # its last bytes are missing
        with pytest.raises(CheckpointError, match="'a' fits no layout of Q2_0 for all of them"):
            _file_tensors(Path("file"), [GgufHeader(Path("file"), {}, infos, blocks.reshape(-1)[:-1])])
    scales = np.ascontiguousarray(blocks[..., :2]).view("<f2").astype(np.float32)
    bits = np.unpackbits(blocks[..., 2:], axis=-1, bitorder="little").astype(np.float32)
    codes = bits * 2 - 1 if quant == "Q1_0" else bits[..., ::2] + bits[..., 1::2] * 2 - 1
    for name, expected in zip("ab", (scales * codes).reshape(2, 6, 256), strict=True):
        assert tensors[name].quant == quant
        loaded = requantise_matrix(tensors[name].packed_matrix())
        assert loaded.quant == "Q4_0"
        np.testing.assert_array_equal(tensors[name].decode(torch.float32).numpy(), expected)
        np.testing.assert_array_equal(decode_rows(loaded.data, "Q4_0", 256), expected)
