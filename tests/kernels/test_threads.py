"""The thread pool, the CPU budget and the choice of the instruction set."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from kernel_types import MakeWeights, RunLayer

from ktqueue.operators import native

ROOT = Path(__file__).parents[2]
SOURCES = [ROOT / "csrc" / "threads" / f"{name}.cpp" for name in ("thread_placement", "cpus")]


def build(name: str, target: Path, *flags: str) -> Path:
    """Compile tests/kernels/NAME.cpp with the sources that the pool uses."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    sources = [*SOURCES, Path(__file__).with_name(name).with_suffix(".cpp")]
    command = [compiler, "-std=c++20", "-O1", "-g", *flags, f"-I{ROOT / 'csrc'}", *map(str, sources), "-pthread"]
    done = subprocess.run([*command, "-o", str(target)], capture_output=True, text=True)
    if done.returncode != 0 and flags:
        pytest.skip(f"the compiler has no {flags[0]}")
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def cpu_check(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that prints how the kernels see a machine."""
    return build("cpu_check", tmp_path_factory.mktemp("cpus") / "check")


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


@pytest.mark.long
def test_the_checks_of_the_pool_hold(tmp_path: Path) -> None:
    done = run(build("thread_pool_check", tmp_path / "check"))
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_pool_has_no_data_race(tmp_path: Path) -> None:
    done = run(build("thread_pool_check", tmp_path / "check", "-fsanitize=thread"))
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
def test_a_cgroup_quota_limits_the_cpus(
    groups: str, files: dict[str, str], cpus: str, cpu_check: Path, tmp_path: Path
) -> None:
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert run(cpu_check, "quota", tmp_path / "groups", tmp_path).stdout.strip() == cpus


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    """A copy of /sys with 2 nodes of 4 cores of 2 threads. Core c has CPUs c and c + 8; node 2 has cores 4 to 7."""
    (tmp_path / "node").mkdir()
    (tmp_path / "node/has_cpu").write_text("0,2\n")
    for node, cpus in ((0, "0-3,8-11\n"), (2, "4-7,12-15\n")):
        (tmp_path / f"node/node{node}").mkdir()
        (tmp_path / f"node/node{node}/cpulist").write_text(cpus)
    for cpu in range(16):
        (tmp_path / f"cpu/cpu{cpu}/topology").mkdir(parents=True)
        (tmp_path / f"cpu/cpu{cpu}/topology/thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("cpus", "count", "expected"),
    [
        ("0-15", 8, "0/0/0 1/1/0 2/2/0 3/3/0 4/4/2 5/5/2 6/6/2 7/7/2"),  # no core twice
        ("0-15", 4, "0/0/0 1/1/0 4/4/2 5/5/2"),  # both nodes
        ("0-15", 10, "0/0/0 1/1/0 2/2/0 3/3/0 8/0/0 4/4/2 5/5/2 6/6/2 7/7/2 12/4/2"),
        ("1,8-10", 3, "1/1/0 8/0/0 10/2/0"),  # 9 shares a core with 1
        ("13", 1, "13/5/2"),
    ],
)
def test_cores_and_nodes_are_filled_evenly(
    cpus: str, count: int, expected: str, cpu_check: Path, two_sockets: Path
) -> None:
    assert run(cpu_check, "spread", two_sockets, cpus, count).stdout.strip() == expected


def test_a_machine_that_hides_its_topology_is_one_node_of_single_cores(cpu_check: Path, tmp_path: Path) -> None:
    assert run(cpu_check, "spread", tmp_path, "3,5", 2).stdout.strip() == "3/3/0 5/5/0"


@pytest.mark.parametrize(
    ("cpus", "quota", "threads", "pin", "expected"),
    [
        ("0-15", 1e9, 8, "auto", "-1/0 1/0 2/0 3/0 4/1 5/1 6/1 7/1"),
        ("0-15", 1e9, 5, "auto", "-1/0 1/0 2/0 4/1 5/1"),
        ("0-15", 1e9, 4, "auto", "any"),  # half of the cores: another worker may have the rest
        ("0-15", 12, 8, "auto", "any"),  # throttled
        ("0-3", 1e9, 4, "auto", "-1/0 1/0 2/0 3/0"),
        ("0-2", 1e9, 3, "auto", "any"),  # a small machine
        ("0-3", 1e9, 5, "auto", "any"),  # more threads than CPUs
        ("0-15", 12, 4, "on", "-1/0 1/0 4/1 5/1"),
        ("0,4", 1e9, 5, "on", "-1/0 0/0 0/0 4/1 4/1"),
        ("0-15", 1e9, 1, "on", "-1/0"),
        ("0-15", 1e9, 8, "off", "any"),
    ],
)
def test_threads_are_pinned_if_they_have_the_machine_for_themselves(
    cpus: str, quota: float, threads: int, pin: str, expected: str, cpu_check: Path, two_sockets: Path
) -> None:
    places = run(cpu_check, "place", two_sockets, cpus, quota, threads, pin).stdout.strip()
    assert places == (" ".join(["-1/0"] * threads) if expected == "any" else expected)


def test_workers_are_pinned_and_the_caller_is_not() -> None:
    script = """
import os, time
from ktqueue_kernels import _kernels
ours = os.sched_getaffinity(0)
_kernels.set_threads(3, 50, pin="on")
deadline = time.monotonic() + 20
while True:
    masks = sorted(len(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task"))
    if masks == sorted([1, 1, len(ours)]) or time.monotonic() > deadline:
        break
    time.sleep(0.01)
print(masks, os.sched_getaffinity(0) == ours, _kernels.nodes() >= 1)
"""
    expected = [1, 1, len(os.sched_getaffinity(0))]
    assert run(sys.executable, "-c", script).stdout.strip() == f"{expected} True True"


def test_a_test_may_pretend_nodes() -> None:
    try:
        native.set_threads(4, torch_threads=1, pretend_nodes=2)
        assert native.nodes() == 2
    finally:
        native.set_threads(1)
    assert native.nodes() == 1


def test_an_unknown_pinning_is_refused() -> None:
    with pytest.raises(ValueError, match="pin must be auto, on or off, got 'yes'"):
        native.set_threads(1, pin="yes")


def test_the_affinity_mask_limits_the_threads() -> None:
    script = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    script += "from ktqueue_kernels import _kernels; print(_kernels.default_threads())"
    assert run(sys.executable, "-c", script).stdout.strip() == "1"


def test_set_threads_divides_the_cpus() -> None:
    before = torch.get_num_threads()
    try:
        for count, torch_threads in [(1, 1), (2, 1), (3, 1), (8, 1), (16, 1)]:
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


def test_calls_from_several_threads_do_not_disturb_each_other(
    make_weights: MakeWeights, run_layer: RunLayer, two_threads: None
) -> None:
    """The interpreter lock is released, and callers do not use each other's workspace."""
    layers = [native.ExpertLayer(make_weights("Q4_0", 4, 64, 32 * (1 + i), seed=i)) for i in range(3)]
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(20, 64, generator=generator), torch.rand(20, 2, generator=generator)
    ids = torch.randint(0, 4, (20, 2), generator=generator)
    expected = [run_layer(layer, x, ids, weights) for layer in layers]
    wrong: list[int] = []

    def call(i: int) -> None:
        wrong.extend(1 for _ in range(100) if not torch.equal(run_layer(layers[i], x, ids, weights), expected[i]))

    callers = [threading.Thread(target=call, args=(i,)) for i in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.mark.parametrize("cap", native.ISAS)
def test_environment_limits_the_instruction_set(cap: str) -> None:
    script = "from ktqueue_kernels import _kernels; print(_kernels.isa())"
    below = [isa for isa in native.isas() if native.ISAS.index(isa) <= native.ISAS.index(cap)]
    assert run(sys.executable, "-c", script, KTQUEUE_ISA=cap).stdout.strip() == below[-1]


def test_unknown_instruction_set_is_refused() -> None:
    done = run(sys.executable, "-c", "from ktqueue_kernels import _kernels; _kernels.isa()", KTQUEUE_ISA="neon")
    known = ", ".join(native.ISAS)
    assert f"ValueError: KTQUEUE_ISA must be one of {known}, got 'neon'" in done.stderr
    with pytest.raises(ValueError, match=f"isa must be one of {known}, got 'sse9'"):
        native.Linear("F32", 1, 1, np.zeros(4, np.uint8), isa="sse9")
