"""Building an engine from settings. Errors name the settings that cannot work."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from ktqueue.core.config import EngineConfig
from ktqueue.core.errors import CheckpointError, ConfigError
from ktqueue.operators.decoder import CpuDecoder
from ktqueue.operators.kv_cache import KVLayout
from ktqueue.workers.startup.build import build, check_choices, resolve_max_model_len, resolve_num_pages, served_name
from ktqueue.workers.startup.device import CudaInstallation, check_device_is_here

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
        ({"served_model_name": ("",)}, "engine.served_model_name"),
        ({"served_model_name": ("a", "a")}, "engine.served_model_name"),
        ({"batch_share": 0}, "engine.batch_share"),
        ({"max_model_len": 100_000}, "engine.max_model_len"),
        ({"max_model_len": 15}, "engine.max_model_len"),  # fewer tokens than a probe of steps has
        ({"threads": 1025}, "engine.threads"),
        ({"page_size": 4097}, "engine.page_size"),
        ({"max_num_batched_tokens": (1 << 17) + 1}, "engine.max_num_batched_tokens"),
        ({"kv_cache_bytes": 100}, "engine.kv_cache_bytes"),
        ({"kv_cache_bytes": 1 << 52}, "engine.kv_cache_bytes"),
        ({"kv_cache_dtype": "fp8"}, "engine.kv_cache_dtype"),
        ({"attention_backend": "magic"}, "engine.attention_backend"),
        ({"handoff": "mail"}, "engine.handoff"),
        ({"expert_streaming": "yes"}, "engine.expert_streaming"),
        ({"gpu_memory_utilization": 1.5}, "engine.gpu_memory_utilization"),
        ({"host_memory_utilization": 0}, "engine.host_memory_utilization"),
    ],
)
def test_an_error_names_a_setting_that_cannot_work(settings: dict[str, Any], param: str) -> None:
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
def test_an_error_names_a_device_on_which_no_engine_runs(device: str, words: str) -> None:
    """Commands that only examine a model refuse it, too."""
    for check in (build, check_choices):
        with pytest.raises(ConfigError) as caught:
            check(EngineConfig(device=device))
        assert words in str(caught.value)
        assert (caught.value.param, caught.value.value) == ("engine.device", device)


def test_memory_of_a_gpu_is_granted_in_vain_without_one(caplog: pytest.LogCaptureFixture) -> None:
    for device, warnings in (("cuda", 0), ("cpu", 1)):
        check_choices(EngineConfig(device=device, gpu_expert_memory_bytes=1 << 30))
        assert caplog.text.count("gpu_expert_memory_bytes has no effect without engine.device cuda") == warnings


@pytest.mark.parametrize(
    ("installation", "words"),
    [
        (
            CudaInstallation(torch="2.99.1+cpu", cuda=None, has_driver=True),
            "machine: torch 2.99.1+cpu is built without CUDA; `pip install --force-reinstall torch==2.99.1`",
        ),
        (
            CudaInstallation(torch="2.99.1+cpu", cuda=None),
            "machine: no NVIDIA driver is loaded, and torch 2.99.1+cpu is built without CUDA",
        ),
        (CudaInstallation(torch="2.9", cuda="13.0"), "no NVIDIA driver is loaded"),
        (
            CudaInstallation(torch="2.9", cuda="13.0", has_driver=True, fault="The NVIDIA driver is too old\nmore"),
            "torch's CUDA 13.0 cannot use the driver: The NVIDIA driver is too old,",
        ),
        (CudaInstallation(torch="2.9", cuda="13.0", has_driver=True), "the NVIDIA driver lists no GPU"),
        (
            CudaInstallation(torch="2.9", cuda="13.0", has_driver=True, gpus=1),
            "must be cuda on this machine, which has 1 GPU, got 'cuda:1'",
        ),
        (
            CudaInstallation(torch="2.9", cuda="13.0", has_driver=True, gpus=2),
            "must be cuda: a process uses one GPU, and CUDA_VISIBLE_DEVICES=1 makes it this one, got 'cuda:1'",
        ),
        (CudaInstallation(torch="2.9", cuda=None, hip="6.4"), "built for ROCm"),
    ],
)
def test_an_error_says_why_there_is_no_cuda_and_what_to_do(installation: CudaInstallation, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_device_is_here("cuda:1", installation)
    assert words in str(caught.value)


def test_a_gpu_that_this_machine_lacks_is_refused_before_the_model_is_loaded() -> None:
    with pytest.raises(ConfigError) as caught:
        build(EngineConfig(device="cuda:99", model="nowhere.gguf"))
    assert (caught.value.param, caught.value.value) == ("engine.device", "cuda:99")


def test_weights_that_do_not_fit_are_an_error_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(CpuDecoder, "load", fail)
    with pytest.raises(ConfigError, match=r"dense weights of demo in .* need more memory than cpu has") as caught:
        build(EngineConfig())
    assert (caught.value.param, caught.value.value) == ("engine.device", "cpu")


UNKNOWN_INSTRUCTION_SET = """
from ktqueue.core.config import EngineConfig
from ktqueue.core.errors import ConfigError
from ktqueue.workers.startup.build import build

try:
    build(EngineConfig())
except ConfigError as error:
    print(error.param, error)
"""


def test_an_error_names_an_unknown_instruction_set() -> None:
    """Another process builds the engine, because the kernels read KTQUEUE_ISA only once."""
    environment = {**os.environ, "KTQUEUE_ISA": "neon"}
    command = [sys.executable, "-c", UNKNOWN_INSTRUCTION_SET]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert found.startswith("KTQUEUE_ISA ")
    assert "KTQUEUE_ISA must be one of" in found
    assert "got 'neon'" in found


def test_a_context_longer_than_the_cache_is_refused() -> None:
    config = EngineConfig(max_model_len=100, num_pages=6)
    with pytest.raises(ConfigError, match=r"engine.max_model_len 100 does not fit.*96.*engine.kv_cache_bytes"):
        resolve_max_model_len(config, 1_000, 6)
    assert resolve_max_model_len(config, 1_000, 7) == 100


def test_the_context_is_limited_by_model_and_cache() -> None:
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
def test_the_cache_size_depends_on_the_available_memory(
    settings: dict[str, Any], longest: int, available: int, tokens: int
) -> None:
    assert LAYOUT.page_bytes == 256 * 16
    assert (
        resolve_num_pages(EngineConfig(**settings), LAYOUT, longest, available, EngineConfig(**settings).rows)
        == tokens // 16
    )


def test_an_error_says_that_memory_is_too_small_for_a_page() -> None:
    with pytest.raises(ConfigError, match=r"at least one page of 4\.0 KiB \(16 tokens\), got 2\.0 KiB"):
        resolve_num_pages(EngineConfig(), LAYOUT, 1_000, 4096, 32)


def test_pages_fill_the_cache() -> None:
    assert LAYOUT.page_bytes == 4096
    assert resolve_num_pages(EngineConfig(kv_cache_bytes=10_000), LAYOUT, 1_000, 0, 32) == 2
    assert resolve_num_pages(EngineConfig(kv_cache_bytes=10_000, num_pages=9), LAYOUT, 1_000, 0, 32) == 9


def test_the_served_name_comes_from_the_file_name() -> None:
    assert served_name("demo") == "demo"
    assert served_name("models/Qwen3-30B-Q4_K_M.gguf") == "Qwen3-30B-Q4_K_M"
    assert served_name("models/deep-00001-of-00003.gguf") == "deep"
    assert served_name("models/Qwen3-30B/") == "Qwen3-30B"


def test_the_built_in_model_is_served_by_default() -> None:
    seen: list[tuple[int, int, str]] = []
    built = build(EngineConfig(num_pages=8, threads=1), lambda *step: seen.append(step))
    assert built.card.name == "demo"
    assert built.card.max_model_len == 128
    assert built.card.max_num_seqs == 512, "auto: as many as a step has tokens"
    assert [tokens for tokens, _ in built.engine.costs.points][:2] == [1, 2]
    assert built.engine.stats().steps == built.engine.stats().generation_tokens == 0, "probes are not counted"
    assert built.config.num_pages == 8
    assert built.config.dtype == "float32"
    assert seen[-1][0] == seen[-1][1] > 0


def test_steps_with_drafts_are_probed() -> None:
    """Steps of one row alone, and with up to eight drafts."""
    engine = build(EngineConfig(num_pages=8, threads=1, max_num_seqs=2, speculation="lookup")).engine
    sizes = [tokens for tokens, _ in engine.costs.points]
    assert sizes[0] == 1 and max(sizes) > 9
    assert engine.stats().steps == engine.stats().drafted_tokens == engine.drafts.probed == 0


def test_an_error_names_a_missing_model(tmp_path: Any) -> None:
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

serve(3)  # Python itself allocates when it runs a line for the first time
before = taken()
serve(500)
print(taken() - before)
"""


@pytest.mark.long
def test_the_largest_step_allocates_no_more_memory() -> None:
    """It runs in another process, because the kernels' buffers belong to the process."""
    found = subprocess.run([sys.executable, "-c", MEMORY_OF_STEPS], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 1 << 20
