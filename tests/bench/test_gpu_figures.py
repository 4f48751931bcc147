"""Figures of a GPU worker's engine: how a trace is divided, and the page of an interrupted run."""

import json

import pytest

from benchmarks.gpu import page
from benchmarks.gpu.profile import REST, Kernel, divide, part_of
from benchmarks.results import RESULTS


def test_kernels_are_recognised_by_their_names() -> None:
    assert part_of("_fetch_kernel") == "over the bus"
    assert part_of("void flashinfer::BatchPrefillWithPagedKVCacheKernel<...>") == "attention"
    assert part_of("_few_rows_linear") == part_of("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT") == "matrices"
    assert part_of("_decode_experts") == part_of("void cutlass::GemmUniversal<GroupProblemShape<...>>") == "experts"
    assert part_of("_add_rms_norm") == "norms, rotary, router"
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
    points = {(row["repeated"], row["rows"]) for row in drafts["decode"]}
    assert sum("%" in line and line.startswith("|") for line in page.drafts(drafts)) == len(points)


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
