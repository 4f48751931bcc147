"""What tests of the engine of a GPU share."""

import pytest
import torch

from ktqueue.engine import scheduler
from ktqueue.operators import native


@pytest.fixture
def small_steps_overlap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 8 tokens are overlapped. Tests on a device are skipped where there is none."""
    native.set_threads()
    monkeypatch.setattr(scheduler, "LEAST_OVERLAPPED", 8)
    if "cuda" in request.node.name and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")


@pytest.fixture(scope="session")
def by_decoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of rules that select GpuDecoder on any device."""
    rules = tmp_path_factory.mktemp("rules") / "rules.yaml"
    rules.write_text("- match: {class: 'ForCausalLM$'}\n  replace: {op: GpuDecoder, activations: float32}\n")
    return str(rules)
