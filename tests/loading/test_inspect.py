"""The inspect report: every byte of the file is in a row, and devices follow the plan."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ktqueue.loading.gguf_checkpoint import read_parts
from ktqueue.loading.gguf_file import Writer, type_name
from ktqueue.loading.inspect import inspect
from ktqueue.loading.load import load_model
from ktqueue.loading.quants import tensor_bytes
from ktqueue.operators.decoder import CpuDecoder
from ktqueue.operators.gpu.decoder import GpuDecoder


def demo_with(quants: dict[str, str], path: Path) -> str:
    """The demo model, some of its tensors in another type with nothing but zeros in them."""
    (header,) = read_parts(Path(inspect("demo").source))
    left_out = {"general.architecture", "general.file_type", "general.quantization_version"}  # the writer's own
    contents = []
    with Writer(path, header.metadata["general.architecture"], "F32") as writer:
        writer.add_metadata({key: value for key, value in header.metadata.items() if key not in left_out})
        for info in header.tensors:
            quant = quants.get(info.name, type_name(info.type_id))
            size = tensor_bytes(quant, info.shape)
            stored = header.data[info.offset : info.offset + size]
            contents.append(np.zeros(size, np.uint8) if info.name in quants else stored)
            writer.add_tensor(info.name, quant, info.shape)
        writer.start()
        for data in contents:
            writer.write(data)
    return str(path)


def test_report_of_the_demo_model() -> None:
    report = inspect("demo")
    assert (report.layers, report.facts.quantization) == (8, "Q4_0")
    assert 29_900_000 < report.parameters < 29_950_000
    assert {row.operator for row in report.rows} == {"CpuDecoder"}
    (experts,) = [row for row in report.rows if row.name.endswith("experts")]
    assert (experts.name, experts.count, experts.quants) == ("model.layers.*.mlp.experts", 8, ("Q4_0",))
    assert experts.file_bytes == experts.device_bytes == 8 * 16 * 3 * 256 * 256 * 18 // 32
    (embedding,) = [row for row in report.rows if row.name == "model.embed_tokens"]
    assert embedding.device_bytes == embedding.file_bytes == 8192 * 256 * 34 // 32 and embedding.quants == ("Q8_0",)
    (head,) = [row for row in report.rows if row.name == "lm_head"]
    assert (head.file_bytes, head.device_bytes) == (0, embedding.file_bytes)
    decoder = load_model("demo").module
    assert isinstance(decoder, CpuDecoder)
    norms = sum(row.device_bytes for row in report.rows if "norm" in row.name)
    assert report.device_bytes["cpu"] == decoder.device_bytes()["cpu"] + norms
    size = Path(report.source).stat().st_size
    assert 0.97 * size < sum(row.file_bytes for row in report.rows) < size
    assert report.device_bytes == {"cpu": sum(row.device_bytes for row in report.rows)}


@pytest.mark.parametrize("model_type", ["qwen2_moe", "mixtral"])
def test_every_tensor_is_in_a_row(model_type: str, make_model: Callable[..., Path], tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "- match: {name: 'layers.1.mlp.experts$'}\n  replace: {op: CpuExperts, device: cpu}\n"
        "- match: {name: 'layers.0$'}\n  replace: {op: default, device: 'cuda:1'}\n"
    )
    report = inspect(str(make_model(model_type)), rules=str(rules), device="cuda")
    assert sum(row.file_bytes for row in report.rows) == 4 * report.parameters
    assert set(report.device_bytes) == {"cpu", "cuda", "cuda:1"}
    operators = {(row.operator, row.device) for row in report.rows if row.name.endswith("experts")}
    assert operators == {("CpuExperts", "cpu"), ("default", "cuda:1")}


def test_a_product_with_a_part_of_floats_is_told_as_decoded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All of q, k and v; and what is warned of is the part."""
    rules = tmp_path / "rules.yaml"
    rules.write_text("- match: {class: 'ForCausalLM$'}\n  replace: {op: GpuDecoder, dense: quantised}\n")
    path = demo_with({"blk.3.attn_v.weight": "F32"}, tmp_path / "mixed.gguf")
    decoder = load_model(path, rules=str(rules)).module
    assert isinstance(decoder, GpuDecoder)
    buffer = 4 * 8192 * 256  # of decoded weights
    assert sum(decoder.device_bytes().values()) == sum(inspect(path, rules=str(rules)).device_bytes.values()) + buffer
    decoder.close()
    assert "dense matrices with F32 are decoded" in caplog.text


def test_embeddings_in_a_type_that_is_widened_are_told_so(tmp_path: Path) -> None:
    path = demo_with({"token_embd.weight": "Q5_0"}, tmp_path / "q5_0.gguf")
    (embedding,) = [row for row in inspect(path).rows if row.name == "model.embed_tokens"]
    assert embedding.file_bytes == 8192 * 256 * 22 // 32
    assert embedding.device_bytes == 8192 * 256 * 34 // 32
