"""The tile kernels against float64 and themselves, on emulated tiles and, where the CPU has AMX, on real ones."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
SOURCES = [
    *(ROOT / "csrc" / f"{name}.cpp" for name in ("isa/cpu_features", "formats/dequantize", "formats/grid_block")),
    *(ROOT / "csrc" / f"{name}.cpp" for name in ("formats/pack", "formats/quant_format", "formats/row_block")),
    ROOT / "csrc" / "kernels" / "prepared_rows.cpp",
    HERE / "tile_kernels_check.cpp",
]
FLAGS = ["-ffp-contract=off", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mfma", "-mf16c"]


def cpu_flags() -> set[str]:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return {flag for line in lines if line.startswith("flags") for flag in line.split(":")[1].split()}


@pytest.mark.long
def test_the_checks_of_the_tile_kernels_hold(tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    if not cpu_flags() >= {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}:
        pytest.skip("the tile kernel is built from lanes of AVX-512")
    includes = [f"-I{ROOT / 'csrc'}", f"-I{HERE}"]
    command = [compiler, "-std=c++20", "-O2", "-DKTQUEUE_X86=1", *FLAGS, *includes, *map(str, SOURCES)]
    built = subprocess.run([*command, "-o", str(tmp_path / "check")], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(tmp_path / "check")], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
