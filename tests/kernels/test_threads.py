"""The thread pool, the CPU budget and the choice of the instruction set."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from ktqueue.operators import native

ROOT = Path(__file__).parents[2]
SOURCES = [
    ROOT / "csrc/thread_pool.cpp",
    ROOT / "csrc/cpu_budget.cpp",
    Path(__file__).with_name("thread_pool_check.cpp"),
]


def build(target: Path, *flags: str) -> Path:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    command = [compiler, "-std=c++20", "-O1", "-g", *flags, f"-I{ROOT / 'csrc'}", *map(str, SOURCES), "-pthread"]
    done = subprocess.run([*command, "-o", str(target)], capture_output=True, text=True)
    if done.returncode != 0 and flags:
        pytest.skip(f"the compiler has no {flags[0]}")
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled C++ checks."""
    return build(tmp_path_factory.mktemp("pool") / "check")


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


def test_pool(check):
    done = run(check)
    assert done.returncode == 0, done.stderr


def test_pool_has_no_data_race(tmp_path):
    done = run(build(tmp_path / "check", "-fsanitize=thread"))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("groups", "files", "cpus"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, "1.5"),
        ("0::/a/b\n", {"a/b/cpu.max": "50000 100000", "a/cpu.max": "150000 100000"}, "0.5"),
        ("0::/\n", {"cpu.max": "400000 100000"}, "4"),
        ("0::/gone\n", {}, "1e+09"),
        (
            "2:cpuset:/x\n4:cpu,cpuacct:/x\n",
            {"cpu/x/cpu.cfs_quota_us": "200000", "cpu/x/cpu.cfs_period_us": "100000"},
            "2",
        ),
        ("4:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, "1e+09"),
        ("no colons\n", {}, "1e+09"),
    ],
)
def test_cgroup_quota(groups, files, cpus, check, tmp_path):
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert run(check, tmp_path / "groups", tmp_path).stdout.strip() == cpus


def test_affinity_lowers_the_cpus():
    script = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    script += "from ktqueue import _kernels; print(_kernels.available_cpus())"
    assert run(sys.executable, "-c", script).stdout.strip() == "1"


def test_set_threads_divides_the_cpus():
    before = torch.get_num_threads()
    try:
        for count, torch_threads in [(1, 1), (2, 1), (3, 1), (8, 2), (16, 4)]:
            assert native.set_threads(count) == count
            assert (torch.get_num_threads(), native.threads()) == (torch_threads, count - torch_threads + 1)
        native.set_threads(4, torch_threads=4)
        assert (torch.get_num_threads(), native.threads()) == (4, 1)
        for bad in (0, -1, 1025):
            with pytest.raises(ValueError, match=f"threads must be from 1 to 1024 .* got {bad}"):
                native.set_threads(bad)
    finally:
        native.set_threads(1)
        torch.set_num_threads(before)


def test_calls_from_several_threads(make_weights, run_layer, two_threads):
    """The interpreter lock is released, and callers do not see each other's workspace."""
    layers = [native.ExpertLayer(make_weights("Q4_0", 4, 64, 32 * (1 + i), seed=i)) for i in range(3)]
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(20, 64, generator=generator), torch.rand(20, 2, generator=generator)
    ids = torch.randint(0, 4, (20, 2), generator=generator)
    expected = [run_layer(layer, x, ids, weights) for layer in layers]
    wrong = []

    def call(i: int) -> None:
        wrong.extend(1 for _ in range(100) if not torch.equal(run_layer(layers[i], x, ids, weights), expected[i]))

    callers = [threading.Thread(target=call, args=(i,)) for i in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.mark.parametrize(("cap", "expected"), [("scalar", "scalar"), ("avx2", native.isa())])
def test_environment_caps_the_instruction_set(cap, expected):
    script = "from ktqueue import _kernels; print(_kernels.isa())"
    assert run(sys.executable, "-c", script, KTQUEUE_ISA=cap).stdout.strip() == expected


def test_unknown_instruction_set_is_refused():
    done = run(sys.executable, "-c", "from ktqueue import _kernels; _kernels.isa()", KTQUEUE_ISA="neon")
    assert "ValueError: KTQUEUE_ISA must be scalar or avx2, got 'neon'" in done.stderr
    with pytest.raises(ValueError, match="isa must be scalar or avx2, got 'sse9'"):
        native.dequantize("F32", torch.zeros(4, dtype=torch.uint8).numpy(), 1, isa="sse9")
