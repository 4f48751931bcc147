"""Synthetic weights that follow a routing trace: each engine chooses the experts of the trace, token by token."""

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktqueue.core.config import EngineConfig
from ktqueue.core.errors import CheckpointError
from ktqueue.core.request import SamplingParams
from ktqueue.loading.synthetic.checkpoint import write_synthetic
from ktqueue.loading.synthetic.routing import SEGMENT, RoutingTrace, read_trace
from ktqueue.workers.startup.build import build

EXPERTS, CHOSEN, LAYERS, PLACES = 64, 8, 3, 512


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of eight sequences. The model has three, so its last one repeats the first."""
    draw = np.random.default_rng(0)
    shape = (4, 200, 2)
    arrays = {
        name: np.argsort(draw.random((*shape, EXPERTS)), axis=-1)[..., :CHOSEN].astype(np.uint8) for name in ("a", "b")
    }
    path = tmp_path_factory.mktemp("trace") / "routing.npz"
    np.savez(path, a=arrays["a"], b=arrays["b"])
    return path


def test_a_trace_is_read_in_parts_of_several_sequences(trace: Path) -> None:
    arrays = np.load(trace)
    found = RoutingTrace.read(trace, PLACES).choices
    assert found.shape == (PLACES, 2, CHOSEN)
    for part, (name, sequence) in enumerate((("a", 0), ("a", 2), ("b", 0), ("b", 2))):
        expected = arrays[name][sequence, 36 : 36 + SEGMENT]
        assert (found[part * SEGMENT : (part + 1) * SEGMENT] == expected).all()


def uses_of(module: Any) -> Any:
    """How often each expert was used: [layers, experts]."""
    return module.expert_uses()


@pytest.mark.parametrize(("quant", "as_file"), [("q4_k_m", False), ("mxfp4", True)])
def test_a_sequence_walks_along_the_trace(trace: Path, tmp_path: Path, quant: str, as_file: bool) -> None:
    model = f"synthetic:mid:{quant}:{LAYERS}:routing={trace}"
    if as_file:
        write_synthetic(model, tmp_path / "m.gguf")
        model = str(tmp_path / "m.gguf")
    built = build(EngineConfig(model=model, max_num_seqs=2, kv_cache_bytes=16 << 20))
    begin, tokens = 500, 40  # over the end of the trace, to its beginning
    before = np.array(uses_of(built.model.module))
    built.engine.add("x", [begin], SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
    answer: list[int] = []
    while built.engine.has_work:
        for output in built.engine.step():
            answer += output.token_ids
    places = [(begin + step) % PLACES for step in range(tokens)]
    assert [token % PLACES for token in answer] == [(begin + 1 + step) % PLACES for step in range(tokens)]
    choices = RoutingTrace.read(trace, PLACES)
    uses = np.array(uses_of(built.model.module)) - before
    for layer in range(2):
        expected = np.bincount(choices.choices[places, layer].reshape(-1), minlength=EXPERTS)
        assert (uses[layer] == expected).all(), f"layer {layer}"
    other = choices.router(2, EXPERTS, CHOSEN)[:, places]
    assert (uses[2] == (other > 0).sum(1)).all() and (uses[2] != uses[0]).any()


def test_a_trace_that_a_model_cannot_follow_is_refused(trace: Path, tmp_path: Path) -> None:
    def refusal(name: str) -> str:
        with pytest.raises(CheckpointError) as caught:
            write_synthetic(name, tmp_path / "m.gguf")
        assert not (tmp_path / "m.gguf").exists()
        return str(caught.value)

    assert "8 of 64 experts, but one of the model has 2 of 8" in refusal(f"synthetic:tiny:q8_0:2:routing={trace}")
    assert "hidden size of at least 512, got 256" in refusal(f"synthetic:tiny:q4_k_m:routing={trace}")
    assert "no .npz file" in refusal(f"synthetic:mid:q8_0:2:routing={tmp_path / 'none.npz'}")
    np.savez(tmp_path / "flat.npz", a=np.zeros((2, 3), np.uint8))
    assert "all arrays" in refusal(f"synthetic:mid:q8_0:2:routing={tmp_path / 'flat.npz'}")
    np.savez(tmp_path / "short.npz", a=np.zeros((1, 20, 2, 8), np.uint8))
    assert "512 tokens is needed" in refusal(f"synthetic:mid:q8_0:2:routing={tmp_path / 'short.npz'}")
    assert "names no file" in refusal("synthetic:mid:q8_0:2:routing=")


def damaged(path: Path) -> list[tuple[bytes, str]]:
    """Files of routing that cannot be read, and what is said of them."""
    whole, no = path.read_bytes(), "this is no .npz file of routing: "
    zipped = io.BytesIO()
    np.savez_compressed(zipped, a=np.arange(4096, dtype=np.uint8).reshape(4, 128, 2, 4))
    broken = zipped.getvalue()
    header = b"{'descr': '<u2', 'fortran_order': False, 'shape': (1000000, 1000000, 4, 2), }"
    huge = b"\x93NUMPY\x01\x00" + (117).to_bytes(2, "little") + header.ljust(117)
    return [
        (b"", no + "File is not a zip file"),
        (pickle.dumps({"a": 1}), no + "File is not a zip file"),
        (whole[: len(whole) // 2], no + "File is not a zip file"),
        (whole[:2000] + b"x" * 40 + whole[2040:], no + "Bad CRC-32"),
        (broken[:100] + b"x" * 40 + broken[140:], no),
        (archive("a.npy", huge), no),
        (archive("a.npy", b""), no),
        (archive("readme.txt", b"hello"), no + "it has other files too"),
        (encrypted(archive("a.npy", whole)), no + "File 'a.npy' is encrypted"),
        (npz(np.array([{"a": 1}], dtype=object)), no + "Object arrays cannot be loaded"),
        (npz(np.full((4, 128, 2, 8), np.nan)), "of whole numbers, got float64 [4, 128, 2, 8]"),
        (npz(np.zeros((4, 128, 0, 8), np.uint8)), "of whole numbers, got uint8 [4, 128, 0, 8]"),
        (npz(np.zeros((4, 128, 2, 0), np.uint8)), "of whole numbers, got uint8 [4, 128, 2, 0]"),
        (npz(np.full((4, 128, 2, 8), -1)), "from 0 to 65535, got -1 to -1"),
        (npz(np.full((4, 128, 2, 8), 2**63, np.uint64)), "from 0 to 65535, got 9223372036854775808"),
    ]


def npz(array: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, a=array)
    return file.getvalue()


def archive(name: str, content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archived:
        archived.writestr(name, content)
    return file.getvalue()


def encrypted(archived: bytes) -> bytes:
    """Says of its only member that it is encrypted, in both places."""
    content = bytearray(archived)
    content[6] |= 1
    content[content.rfind(b"PK\x01\x02") + 8] |= 1
    return bytes(content)


def test_a_damaged_trace_is_an_error_that_names_it(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.npz"
    for content, reason in damaged(trace):
        path.write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            read_trace(path)
        assert str(caught.value).startswith(f"{path}: ")
        assert reason in str(caught.value)
