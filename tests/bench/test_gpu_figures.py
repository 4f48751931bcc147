"""Figures of a GPU worker's engine: how a trace is divided, and the page of an interrupted run."""

import json

import pytest

from benchmarks.gpu import page, turns_page
from benchmarks.gpu.drafts import compared
from benchmarks.gpu.prefill import in_the_median
from benchmarks.gpu.profile import REST, Kernel, divide, part_of
from benchmarks.results import RESULTS

PAGE = {
    "model": "m", "turns": 3, "environment": {"gpu": {"name": "g"}, "cpu": "c", "threads": 16},
    "machine": {"commit": "abc", "taken": "today"}, "command": "x",
}  # fmt: skip


def test_kernels_are_recognised_by_their_names() -> None:
    assert part_of("_fetch_kernel") == "over the bus"
    assert part_of("void flashinfer::BatchPrefillWithPagedKVCacheKernel<...>") == "attention"
    assert part_of("_few_rows_linear") == part_of("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT") == "matrices"
    assert part_of("_decode_experts") == part_of("void cutlass::GemmUniversal<GroupProblemShape<...>>") == "experts"
    assert part_of("_add_rms_norm") == "norms, rotary, router"
    assert part_of("_down_of_pair") == "experts"
    assert part_of("Memcpy HtoD (Pinned -> Device)") == REST


def test_a_trace_is_divided_without_remainder() -> None:
    kernels = [
        Kernel("_route", 100.0, 110.0),
        Kernel("_few_rows_linear", 112.0, 132.0),  # behind a short gap
        Kernel("_fetch_kernel", 120.0, 142.0),  # half of it beside the one before
        Kernel("_experts_kernel", 125.0, 130.0),  # all of it
        Kernel("Memset", 242.0, 244.0),  # behind a long gap
    ]
    divided = divide(kernels[::-1], 2)
    assert divided["kernels"] == 2.5
    assert divided["ms"] == pytest.approx(
        {
            "over the bus": 0.005,
            "experts": 0.0,
            "attention": 0.0,
            "norms, rotary, router": 0.005,
            "matrices": 0.010,
            REST: 0.001,
            "short gaps": 0.001,
            "long gaps": 0.050,
        }
    )
    assert sum(divided["ms"].values()) == pytest.approx((244.0 - 100.0) / 2 / 1e3)


def test_the_fastest_tiles_are_shown_beside_those_in_use() -> None:
    result = json.loads((RESULTS / "expert-tiles-h200.json").read_text())
    of_sixteen = [line.split("|")[2].strip() for line in page.expert_tiles(result) if line.startswith("| 16 |")]
    assert len(of_sixteen) == page.SHOWN + 1 and of_sixteen[-1] == "as used"
    times = {figure["choice"]: figure["layer_us"] for figure in result["figures"] if figure["rows"] == 16}
    assert sorted(times.values())[: page.SHOWN] == [times[name] for name in of_sixteen[:-1]]


def test_trials_and_drafts_have_a_line_for_each_point() -> None:
    trials, drafts = (json.loads((RESULTS / f"{name}-h200.json").read_text()) for name in ("trials", "drafts"))
    lines = page.trials(trials)
    assert sum(line.startswith("| decode_experts |") for line in lines) == 4 + 3 + 2
    trials["runs"] = [{**run, "traced": []} for run in trials["runs"]]  # as an interrupted run leaves it
    assert sum(line.startswith("| decode_experts |") for line in page.trials(trials)) == 4 + 3
    assert sum("%" in line and line.startswith("|") for line in turns_page.drafts(drafts)) == len(drafts["figures"])


def test_drafts_are_compared_within_a_turn() -> None:
    """The machine is half as fast in the second of three turns, and drafts always gain a tenth."""
    common = {"expert_gib": 0, "drafts": "lookup", "repeated": 1.0, "right": None, "rows": 4}
    counts = {"steps": 9, "steps_ahead": 0, "drafted": 30, "accepted": 20}
    speeds = [(False, 100.0), (True, 110.0), (True, 55.0), (False, 50.0), (False, 102.0), (True, 112.2)]
    figures = [{**common, **counts, "on": on, "tokens_per_second": speed} for on, speed in speeds]
    (line,) = compared(figures)
    assert line["off"] == 100.0 and line["with"] == 110.0 and line["gain"] == pytest.approx(0.1)
    assert compared(figures[:1]) == []  # as an interrupted run leaves it
    modelled = [{**figure, "drafts": "model", "right": 0.5} for figure in figures]
    lines = turns_page.drafts({**PAGE, "draft_model": "d", "output_tokens": 9, "figures": compared(figures + modelled)})
    assert [line for line in lines if "| +10.0% |" in line] == [
        f"| 0 | 4 | {part} | 100.0 | 110.0 | +10.0% | 9 | 9 | 20 of 30 | 0 |" for part in ("100%", "50%")
    ]


def test_prompts_have_a_line_for_each_place_and_length() -> None:
    common = {"steps": 1.0, "bus_gb": 16.0, "cpu_gb": 0.0, "dram_gb_s": 100.0, "fastest": 0.1}
    figures = [
        {"experts": "CPU", "step_tokens": 8192, "tokens": tokens, "seconds": seconds, **common}
        for tokens, seconds in ((2048, 0.4), (8192, 0.5), (2048, 0.6), (8192, 0.5), (2048, 0.5))
    ]
    lines = turns_page.prefill({**PAGE, "prompts": 7, "figures": in_the_median(figures)})
    assert lines[-2:] == [
        "| CPU | 2048 | 8192 | 4096 | 500 | 1 | 16.0 | 32.0 | 0.0 | 100 |",
        "| CPU | 8192 | 8192 | 16384 | 500 | 1 | 16.0 | 32.0 | 0.0 | 100 |",
    ]


def test_an_interrupted_run_has_tables_of_what_it_measured() -> None:
    """The command writes its result, and with it the page, after each part."""
    result = json.loads((RESULTS / "gpu-h200.json").read_text())
    lines = page.engine(result)
    del result["deferred"]  # is empty
    for part in ("curve", "prefetch", "prefill"):
        del result[part]
        before, lines = lines, page.engine(result)
        assert set(lines) < set(before), part
    assert sum(line.startswith("| 64 |") for line in lines) == 1
