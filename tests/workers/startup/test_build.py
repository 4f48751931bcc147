"""Settings that cannot work are refused at start, by name."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ktqueue.core.config import EngineConfig
from ktqueue.core.errors import CheckpointError, ConfigError
from ktqueue.operators import native
from ktqueue.operators.kv_cache import KVLayout
from ktqueue.workers.startup import device as device_module
from ktqueue.workers.startup.build import build, check_choices, resolve_max_model_len, resolve_num_pages, served_name

LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=8, page_size=16, dtype=torch.float32)


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"threads": 0}, "engine.threads"),
        ({"pin_threads": "yes"}, "engine.pin_threads"),
        ({"page_size": 0}, "engine.page_size"),
        ({"num_pages": 0}, "engine.num_pages"),
        ({"max_num_seqs": 0}, "engine.max_num_seqs"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "engine.max_num_batched_tokens"),
        ({"dtype": "float8"}, "engine.dtype"),
        ({"device": "toaster"}, "engine.device"),
        ({"served_model_name": ""}, "engine.served_model_name"),
        ({"batch_share": 0}, "engine.batch_share"),
        ({"max_model_len": 100_000}, "engine.max_model_len"),
        ({"kv_cache_bytes": 100}, "engine.kv_cache_bytes"),
        ({"kv_cache_dtype": "fp8"}, "engine.kv_cache_dtype"),
        ({"attention_backend": "magic"}, "engine.attention_backend"),
        ({"handoff": "mail"}, "engine.handoff"),
        ({"expert_streaming": "yes"}, "engine.expert_streaming"),
        ({"gpu_memory_utilization": 1.5}, "engine.gpu_memory_utilization"),
        ({"host_memory_utilization": 0}, "engine.host_memory_utilization"),
    ],
)
def test_a_setting_that_cannot_work_is_named(settings: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(EngineConfig(**settings))
    assert caught.value.param == param
    assert param in caught.value.message
    assert caught.value.limit is not None
    assert str(caught.value.value) in caught.value.message.replace(" B", "")


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("xpu", "Intel GPUs are not supported yet; cpu works"),
        ("xpu:1", "Intel GPUs"),
        ("npu", "Ascend NPUs"),
        ("rocm", "AMD GPUs"),
        ("mps", "Apple GPUs"),
        ("gpu", "did you mean cuda?"),
        ("cuda:", "cpu, cuda or cuda:N"),
        ("cuda:x", "cpu, cuda or cuda:N"),
        ("meta", "cpu, cuda or cuda:N"),
    ],
)
def test_a_device_that_no_engine_runs_on_is_refused_by_name(device: str, words: str) -> None:
    """By what looks at a model, too."""
    for check in (build, check_choices):
        with pytest.raises(ConfigError) as caught:
            check(EngineConfig(device=device))
        assert words in str(caught.value)
        assert (caught.value.param, caught.value.value) == ("engine.device", device)


def test_why_there_is_no_cuda_and_how_to_mend_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = tmp_path / "version"
    monkeypatch.setattr(device_module, "NVIDIA_DRIVER", driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def refusal() -> str:
        with pytest.raises(ConfigError) as caught:
            build(EngineConfig(device="cuda:1"))
        return str(caught.value)

    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch, "__version__", "2.99.1+cpu")
    assert "torch 2.99.1+cpu is built without CUDA; `pip install --force-reinstall torch==2.99.1`" in refusal()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "no NVIDIA driver is loaded" in refusal()
    driver.touch()

    def too_old() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\nmore")

    monkeypatch.setattr(torch.cuda, "init", too_old)
    assert "torch's CUDA 13.0 cannot use the driver: The NVIDIA driver on your system is too old," in refusal()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "must be cuda or cuda:0 on this machine, which has 1 GPU, got 'cuda:1'" in refusal()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "built for ROCm" in refusal()


def test_an_unknown_instruction_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def isa() -> str:
        raise ValueError("KTQUEUE_ISA must be one of scalar, got 'neon'")

    monkeypatch.setattr(native, "isa", isa)
    with pytest.raises(ConfigError, match="KTQUEUE_ISA must be one of") as caught:
        build(EngineConfig())
    assert caught.value.param == "KTQUEUE_ISA"


def test_a_context_longer_than_the_cache_is_refused() -> None:
    config = EngineConfig(max_model_len=100, num_pages=6)
    with pytest.raises(ConfigError, match=r"engine.max_model_len 100 does not fit.*96.*engine.kv_cache_bytes"):
        resolve_max_model_len(config, 1_000, 6)
    assert resolve_max_model_len(config, 1_000, 7) == 100


def test_the_context_is_what_model_and_cache_allow() -> None:
    assert resolve_max_model_len(EngineConfig(), 1_000, 10_000) == 1_000
    assert resolve_max_model_len(EngineConfig(), 1_000, 10) == 160


@pytest.mark.parametrize(
    ("settings", "longest", "available", "tokens"),
    [
        ({}, 1_000, 1 << 30, 32 * 1_000),  # the context of each row
        ({}, 100_000, 1 << 40, 32 * 4_096),
        ({"max_model_len": 512}, 100_000, 1 << 40, 32 * 512),
        ({"max_num_seqs": 1, "max_model_len": 50_000}, 100_000, 1 << 40, 50_000),
        ({}, 100_000, 10_000 * 256, 10_000 // 2),  # half of the memory
        ({"host_memory_utilization": 0.125}, 100_000, 10_000 * 256, 10_000 // 8),
    ],
)
def test_the_cache_follows_the_memory_that_is_there(
    settings: dict[str, Any], longest: int, available: int, tokens: int
) -> None:
    assert LAYOUT.page_bytes == 256 * 16
    assert resolve_num_pages(EngineConfig(**settings), LAYOUT, longest, available) == tokens // 16


def test_too_little_memory_for_one_page_is_said() -> None:
    with pytest.raises(ConfigError, match=r"at least one page of 4\.0 KiB \(16 tokens\), got 2\.0 KiB"):
        resolve_num_pages(EngineConfig(), LAYOUT, 1_000, 4096)


def test_pages_fill_the_cache() -> None:
    assert LAYOUT.page_bytes == 4096
    assert resolve_num_pages(EngineConfig(kv_cache_bytes=10_000), LAYOUT, 1_000, 0) == 2
    assert resolve_num_pages(EngineConfig(kv_cache_bytes=10_000, num_pages=9), LAYOUT, 1_000, 0) == 9


def test_the_name_that_clients_use() -> None:
    assert served_name("demo") == "demo"
    assert served_name("models/Qwen3-30B-Q4_K_M.gguf") == "Qwen3-30B-Q4_K_M"
    assert served_name("models/deep-00001-of-00003.gguf") == "deep"
    assert served_name("models/Qwen3-30B/") == "Qwen3-30B"


def test_the_built_in_model_is_served_by_default() -> None:
    seen: list[tuple[int, int, str]] = []
    built = build(EngineConfig(num_pages=8, threads=1), lambda *step: seen.append(step))
    assert built.card.name == "demo"
    assert built.card.max_model_len == 128
    assert built.card.max_num_seqs == 32
    assert built.config.num_pages == 8
    assert built.config.dtype == "float32"
    assert seen[-1][0] == seen[-1][1] > 0


def test_a_missing_model_is_named(tmp_path: Any) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        build(EngineConfig(model=str(tmp_path / "nowhere.gguf")))


MEMORY_OF_STEPS = """
import ctypes
from ktqueue.core.config import EngineConfig
from ktqueue.core.request import SamplingParams
from ktqueue.workers.startup.build import build

class Counts(ctypes.Structure):  # mallinfo2(3)
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "mapped", "usmblks", "fsmblks", "used", "free", "keepcost")]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Counts

def taken():
    counts = mallinfo()
    return counts.used + counts.mapped

engine = build(EngineConfig(threads=1, enable_prefix_caching=False)).engine

def serve(tokens):
    engine.add("x", list(range(tokens)), SamplingParams(max_tokens=2, temperature=0.0))
    while engine.has_work:
        engine.step()

serve(3)  # what Python keeps once it has run a line
before = taken()
serve(500)
print(taken() - before)
"""


def test_the_largest_step_takes_no_memory_that_was_not_there_at_the_start() -> None:
    """In a process of its own: the kernels' buffers are those of the process."""
    found = subprocess.run([sys.executable, "-c", MEMORY_OF_STEPS], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 1 << 20
