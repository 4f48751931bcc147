"""Synthetic weights that follow a routing trace: each engine chooses the experts of the trace, token by token."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktqueue.core.config import EngineConfig
from ktqueue.core.errors import CheckpointError
from ktqueue.core.request import SamplingParams
from ktqueue.loading.synthetic.checkpoint import write_synthetic
from ktqueue.loading.synthetic.routing import SEGMENT, RoutingTrace
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
