"""Routing that is recorded is a trace that synthetic weights follow; workers may add to one file."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoder_families import make_model

from ktqueue.core.config import EngineConfig
from ktqueue.core.errors import CheckpointError, ConfigError
from ktqueue.core.request import SamplingParams
from ktqueue.engine.routing_recorder import MOST_SEGMENTS, SEGMENT, Choices
from ktqueue.loading.synthetic.checkpoint import write_synthetic
from ktqueue.loading.synthetic.routing import read_trace
from ktqueue.operators.decoder import CpuDecoder
from ktqueue.operators.gpu.decoder import GpuDecoder
from ktqueue.workers.startup.build import Built, build
from ktqueue.workers.startup.routing_file import add_segments, start_routing


def uses_of(built: Built, prompt: list[int]) -> Any:
    """How often each expert is used while so many tokens are generated that one segment is computed."""
    module: Any = built.model.module
    before = np.array(module.expert_uses())
    built.engine.add("x", prompt, SamplingParams(temperature=0.0, max_tokens=SEGMENT, ignore_eos=True))
    while built.engine.has_work:
        built.engine.step()
    return np.array(module.expert_uses()) - before


def segments(count: int, value: int = 0) -> list[Choices]:
    return [np.full((SEGMENT, 2, 3), value, np.uint16)] * count


def test_a_recorded_model_is_replayed_by_a_synthetic_one(tmp_path: Path) -> None:
    path = tmp_path / "demo.npz"
    built = build(EngineConfig(model="demo", max_num_seqs=1, num_pages=40, routing_file=str(path)))
    routing = start_routing(built.config, built.model, built.engine)
    assert routing is not None
    expected = uses_of(built, [11])
    routing.close()
    routing.close()  # does nothing
    (found,) = read_trace(path)
    assert found.shape == (1, SEGMENT, *expected.shape[:1], 4) and found.dtype == np.uint8
    shape = {"num_experts": 16, "num_experts_per_tok": 4, "num_hidden_layers": len(expected)}
    write_synthetic(f"synthetic:tiny:q8_0:routing={path}", tmp_path / "m.gguf", layers=len(expected), changes=shape)
    replayed = uses_of(build(EngineConfig(model=str(tmp_path / "m.gguf"), max_num_seqs=1, num_pages=40)), [0])
    assert (replayed == expected).all()


def test_workers_add_to_one_file_up_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "r.npz"
    assert add_segments(path, segments(2)) == 2
    assert add_segments(path, segments(3, value=300)) == 5
    (found,) = read_trace(path)
    assert found.shape == (5, SEGMENT, 2, 3) and found.dtype == np.uint16
    assert (found[:2] == 0).all() and (found[2:] == 300).all()
    assert add_segments(path, segments(MOST_SEGMENTS)) == MOST_SEGMENTS
    assert [entry.name for entry in tmp_path.iterdir()] == ["r.npz"]


def test_a_file_of_another_model_stays(tmp_path: Path) -> None:
    path = tmp_path / "r.npz"
    np.savez(path, a=np.zeros((1, SEGMENT, 4, 3), np.uint8))
    with pytest.raises(CheckpointError, match=r"has routing of \[\[1, 128, 4, 3\]\], not of \[parts, 128, 2, 3\]"):
        add_segments(path, segments(2))
    np.savez(path, a=np.zeros((1, SEGMENT, 2, 3), np.uint8), b=np.zeros((1, SEGMENT, 2, 3), np.uint8))
    with pytest.raises(CheckpointError, match=r"has routing of \[\[1, 128, 2, 3\], \[1, 128, 2, 3\]\], not"):
        add_segments(path, segments(2))
    path.write_text("no trace")
    with pytest.raises(CheckpointError, match=r"no \.npz file"):
        add_segments(path, segments(2))
    assert path.read_text() == "no trace"


def test_a_file_that_cannot_be_added_to_is_refused_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "r.npz"
    config = EngineConfig(model="demo", max_num_seqs=1, num_pages=40, routing_file=str(path))
    np.savez(path, a=np.zeros((1, SEGMENT, 8, 4), np.uint8))
    build(config)
    for layers, chosen in ((7, 4), (8, 2)):
        np.savez(path, a=np.zeros((1, SEGMENT, layers, chosen), np.uint8))
        with pytest.raises(ConfigError, match=r"has routing of .*, not of \[parts, 128, 8, 4\]"):
            build(config)
    path.write_text("no trace")
    with pytest.raises(ConfigError, match=r"engine.routing_file .*no \.npz file"):
        build(config)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"speculation": "lookup"}, "do not follow each other"),
        ({"routing_file": "nowhere/r.npz"}, "its folder does not exist"),
        ({"rules": "modules"}, "cannot say which experts"),
    ],
)
def test_what_cannot_be_recorded_is_refused(settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    known: dict[str, Any] = {"model": "demo", "max_num_seqs": 1, "num_pages": 40, "routing_file": str(tmp_path / "r")}
    with pytest.raises(ConfigError, match=reason) as caught:
        build(EngineConfig(**known | settings))
    assert caught.value.param == "engine.routing_file"


@pytest.mark.parametrize("operator", [CpuDecoder, GpuDecoder])
def test_a_dense_model_has_no_routing(operator: Any) -> None:
    with pytest.raises(ValueError, match="no routed experts"):
        operator.from_module(make_model("qwen3")).record_choices(4)
