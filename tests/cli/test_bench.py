"""`ktqueue bench experts` on a tiny layer: its tables, JSON and errors. Figures are not compared."""

import io
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import OpenTerminal, Run
from rich.console import Console

from ktqueue.bench.experts import KernelFigure
from ktqueue.bench.machine import Probes
from ktqueue.bench.roofline import Bound
from ktqueue.cli.bench.tables import show_points
from ktqueue.cli.main import run
from ktqueue.operators import native

SHAPE = ("--num-experts", 4, "--experts-per-token", 2, "--hidden-size", 256, "--intermediate-size", 256)
TINY = (*SHAPE, "--seconds", 0, "--threads", 2, "--memory", "1MiB")
POINT_NUMBERS = (
    "seconds",
    "bandwidth",
    "peak",
    "limit_seconds",
    "bytes_per_second",
    "operations_per_second",
    "bandwidth_share",
    "peak_share",
    "share",
)


@pytest.fixture(autouse=True)
def one_thread_again() -> Iterator[None]:
    """Set this process back to one thread after each test."""
    yield
    native.set_threads(1)


def bench(*flags: object) -> int:
    """Run the command in this process on the tiny layer. Returns its exit code."""
    return run(["bench", "experts", *map(str, (*TINY, *flags))])


def test_tables_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--formats", "q8_0,F32", "--isa", "scalar", "--per-expert", "1,3", "--tokens", "5"]
    target = tmp_path / "out.json"
    assert bench(*flags, "--json", target) == 0
    shown = capsys.readouterr()
    for word in ("DRAM", "scalar", "GFLOP/s", "Q8_0", "5 tok", "of DRAM"):
        assert word in shown.out
    assert "experts: 6/6" in shown.err
    found = json.loads(target.read_text())
    assert found["format"] == 1
    assert found["shape"] == {"hidden": 256, "intermediate": 256, "experts": 4, "experts_per_token": 2}
    measured = found["machine"]
    assert measured["threads"] == 2
    assert measured["bandwidths"][-1]["level"] == "DRAM"
    for figure in (*measured["bandwidths"], *measured["peaks"]):
        assert figure["one_thread"] > 0
        assert figure["all_threads"] > 0
    assert {peak["isa"] for peak in measured["peaks"]} >= {"scalar"}
    points = found["points"]
    loads = [(1, False), (3, False), (5, True)]
    assert [(p["quant"], p["isa"], p["rows"], p["routed"]) for p in points] == [
        (quant, "scalar", *load) for quant in ("Q8_0", "F32") for load in loads
    ]
    weights = 3 * 256 * 256
    for point in points:
        assert all(point[name] > 0 and math.isfinite(point[name]) for name in POINT_NUMBERS)
        assert point["tokens"] == point["rows"]
        touched = point["experts_touched"]
        assert touched == 2 if not point["routed"] else 2 <= touched <= 4
        assert point["bytes"] == touched * weights * (4 if point["quant"] == "F32" else 34 / 32)
        assert point["operations"] == 2 * weights * 2 * point["tokens"]
        assert point["arithmetic"] == ("fp32" if point["quant"] == "F32" else "int8")
        assert point["bound"] in ("memory", "arithmetic")
        assert point["share"] == pytest.approx(max(point["bandwidth_share"], point["peak_share"]))
        assert point["limit_seconds"] == pytest.approx(
            max(point["bytes"] / point["bandwidth"], point["operations"] / point["peak"])
        )


def test_each_cache_that_the_probe_can_read_is_measured() -> None:
    native.set_threads(2)
    caches = {"L1": 32 << 10, "L2": 1 << 20, "L3": 16 << 20}
    assert [found.level for found in Probes(8 << 20, caches).machine().bandwidths] == ["L2", "L3", "DRAM"]
    assert [found.level for found in Probes(1 << 20, caches).machine().bandwidths] == ["L2", "DRAM"]


def test_the_table_fits_80_columns() -> None:
    output = io.StringIO()
    point = KernelFigure(
        quant="IQ4_XS", isa="avxvnni", rows=512, routed=True, tokens=512, experts_touched=1, seconds=0.001,
        bytes=150_000_000, operations=10**10, bandwidth=1e11, peak=1e13, peak_isa="amx", arithmetic="int8",
        bound=Bound.MEMORY, limit_seconds=0.001, disturbed=True,
    )  # fmt: skip
    show_points([point], Console(file=output, width=80))
    head = "format isa rows a layer GB/s of DRAM GFLOP/s of peak bound by"
    assert head in [" ".join(line.split()) for line in output.getvalue().splitlines()]


def test_json_on_standard_output_is_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--formats", "Q4_K", "--per-expert", "1", "--json", "-") == 0
    assert len(json.loads(capsys.readouterr().out)["points"]) == 1


def test_down_may_have_another_format_than_gate_and_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--formats", "Q4_K,Q4_K/Q6_K,Q6_K", "--per-expert", "1", "--json", "-") == 0
    points = json.loads(capsys.readouterr().out)["points"]
    small, mixed, large = (point["bytes"] for point in points)
    assert [point["quant"] for point in points] == ["Q4_K", "Q4_K/Q6_K", "Q6_K"]
    assert 3 * mixed == 2 * small + large


def test_an_interrupted_sweep_shows_the_figures_that_it_has(terminal: OpenTerminal, tmp_path: Path) -> None:
    words = ("--formats", "Q8_0,Q4_K", "--isa", "scalar", "--per-expert", "1", "--seconds", 3, "--json", "figures.json")
    process = terminal("bench", "experts", *TINY, *words)
    process.wait_for("Q4_K")
    process.interrupt("bound by")
    assert process.end() == 130
    assert [point["quant"] for point in json.loads((tmp_path / "figures.json").read_text())["points"]] == ["Q8_0"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--formats", "Q4_K,Q9_Z"], "--formats: this machine has F32, "),
        (["--formats", "Q4_K/Q9_Z"], "--formats: this machine has F32, "),
        (["--formats", "Q4_K/"], "--formats: this machine has F32, "),
        (["--isa", "scalar/scalar"], "--isa: this machine has scalar"),
        (["--isa", "avx1024"], "--isa: this machine has scalar"),
        (["--formats", ","], "--formats: this machine has"),
        (["--per-expert", "1,x"], "--per-expert: must be numbers from 1 to 65536 with commas, got 'x'"),
        (["--tokens", "0"], "--tokens: must be numbers from 1"),
        (["--memory", "much"], "--memory: must be a size such as 256MiB, got 'much'"),
        (["--experts-per-token", "129"], "--experts-per-token must be at most --num-experts, got 129 of 128"),
        (["--hidden-size", "100", "--formats", "Q4_K"], "Q4_K"),
        (["--hidden-size", "1048576", "--intermediate-size", "1048576"], "of memory, but only"),
    ],
)
def test_an_error_names_the_flag(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "experts", *flags]) == 2
    shown = capsys.readouterr()
    assert says in shown.err
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1


def test_an_unknown_instruction_set_is_refused(ktqueue: Run) -> None:
    done = ktqueue("bench", "experts", env={"KTQUEUE_ISA": "neon"})
    assert done.returncode == 2
    assert "KTQUEUE_ISA must be one of" in done.stderr
