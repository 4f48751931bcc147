"""The page of a GPU's engine: sections for gpu*, placement, residency*, profile*, attention*, served-* and others."""

from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.tables import Columns, Row, section, table
from ktqueue.bench.engine import LAUNCHES

SHOWN = 3
"""Of each number of rows, the fastest tiles of a page."""
_STEP: Columns = {"rows": "{rows}", "tok/s": "{tokens_per_second:.1f}", "step": "{step_ms:.2f} ms"}
_FASTEST: Columns = {"fastest": "{fastest_step_ms:.2f} ms"}
_FETCHED: Columns = {"fetched": "{expert_fetched_share:.0%}"}
_PROBE: Columns = {"probe": "{dram_gb_s:.0f}"}
_GPU: dict[str, tuple[str, Columns]] = {  # part of the result: what it is, its columns
    "decode": (
        "All experts on the CPU. Fetched: the share of a step's experts that come over the bus; CPU: what the expert "
        "layers there read a second, prompts included; probe: what all threads read just after.",
        {**_STEP, **_FASTEST, "host": "{host_share:.1%}", **_FETCHED, "CPU GB/s": "{cpu_experts_gb_s:.0f}", **_PROBE},
    ),
    "prefill": (
        "",
        {"prompt": "{tokens}", "tok/s": "{tokens_per_second:.0f}", "ms": "{ms:.0f}", "fastest": "{fastest_ms:.0f}"},
    ),
    "prefetch": (
        "Experts fetched into the CPU's caches while the GPU attends, in turns with none. Right: of the experts that "
        "were predicted, those that were used.",
        {
            "expert prefetch": lambda row: "on" if row["expert_prefetch"] else "off", **_STEP, **_FASTEST,
            "right": "{expert_prediction_rate:.0%}", **_FETCHED, **_PROBE,
        },
    ),
    "overlap": (
        "Decode steps in halves that take turns on GPU and CPU (two-batch overlap, since removed). Cut: the share of "
        "steps that ran so.",
        {
            "two-batch overlap": "{two_batch_overlap}", "rows": "{rows}", "prompts": "{prompt_tokens}",
            "tok/s": "{tokens_per_second:.1f}", "step": "{step_ms:.2f} ms", **_FASTEST, "cut": "{overlapped:.0%}",
            **_FETCHED, **_PROBE,
        },
    ),
    "deferred": ("", {"deferred experts of a token": "{deferred_experts}", **_STEP, **_FETCHED}),
    "curve": (
        "",
        {
            "experts in GPU memory": "{expert_memory_gib:.1f} GiB", **_STEP,
            "hit rate": "{expert_hit_rate:.0%}", **_FETCHED,
        },
    ),
}  # fmt: skip


def engine(result: dict[str, Any]) -> list[str]:
    """The engine of a GPU worker. The result of an interrupted run has fewer parts."""
    environment = result["environment"]
    packages = environment["packages"]
    lines = [
        f"### {result['model']}, on a GPU",
        f"{environment['gpu']['name']}, CUDA {environment['gpu']['cuda']}; {environment['cpu']}, "
        f"{environment['threads']} threads, {environment['isa']}; torch {packages['torch']}, triton "
        f"{packages['triton']}, FlashInfer {packages['flashinfer-python']}; {taken(result)}. Prompts of 128 tokens, "
        f"greedy. `{result['command']}`",
        *([result["note"]] if "note" in result else []),
    ]
    for part, (text, columns) in _GPU.items():
        if result.get(part):
            words = int(part in ("prefetch", "overlap"))
            lines += ["", *([text, ""] if text else []), *table(columns, result[part], words=words)]
    return lines


def profile(result: dict[str, Any]) -> list[str]:
    """Where the time of a decode step goes."""
    parts = list(result["on_cpu"][0]["ms"])
    return section(
        f"{result['model']}: a decode step",
        f"Milliseconds of a step, by CUDA's profiler over {result['steps']} of them, after prompts of "
        f"{result['prompt_tokens']}; {graphics(result)}; {taken(result)}. Gaps: between kernels; long ones, of more "
        f"than 5 us, are waits for the CPU's experts and for the host. CPU: its experts, and what it read of them. "
        f"`{result['command']}`",
        {
            "experts": "{place}",
            "rows": "{rows}",
            "step": "{step_ms:.2f}",
            "traced": "{traced_step_ms:.2f}",
            "kernels": "{kernels:.0f}",
            **{part: f"{{ms[{part}]:.2f}}" for part in parts},
            "CPU": "{cpu_experts_ms:.2f}",
            "read": "{cpu_experts_gb:.2f} GB",
        },
        [{"place": place, **row} for place in ("CPU", "GPU") for row in result[f"on_{place.lower()}"]],
        words=1,
    )


def placement(result: dict[str, Any]) -> list[str]:
    """Policies of placement beside each other, by a routing trace."""
    points: dict[tuple[int, float], dict[str, Any]] = {}
    for row in result["figures"]:
        point = points.setdefault((row["rows"], row["room"]), {"rows": row["rows"], "room": row["room"]})
        point[row["policy"]] = row
    policies = list(dict.fromkeys(row["policy"] for row in result["figures"]))
    cold = [policy for policy in policies if not policy.endswith(", known")]
    shown = ["lfu with decay", "both", "both, known"]
    where: Columns = {"rows": "{rows}", "room": "{room:.1%}"}
    lines = section(
        "Experts found in GPU memory, by policy",
        f"A simulation with the worker's own placement and a routing trace of {result['experts']} experts in a layer; "
        f"it says nothing of time. Rows of different sequences decode after prompts of {result['prompt_tokens']} "
        "tokens. Room: the part of a layer's experts that has slots. The table has the share of uses found there by "
        "rows that decode, once a policy has learned. Both, the worker's policy: frequency and recent uses. Lfu with "
        f"decay was its policy before. {taken(result)}. `{result['command']}`",
        {**where, **{policy: f"{{{policy}[found]:.1%}}" for policy in cold}},
        points.values(),
    )
    return [
        *lines,
        "",
        f"The share in the first {result['first_steps']} steps, where a policy may know the uses of an earlier run; "
        "then experts of a layer and step that are missing, and experts that move in for 100 steps of "
        f"{result['layers']} layers:",
        "",
        *table(
            {
                **where,
                **{policy: f"{{{policy}[found_first]:.1%}}" for policy in (*shown, "frequency, known")},
                **{f"missing: {policy}": f"{{{policy}[missing]:.2f}}" for policy in shown[:2]},
                **{f"moves: {policy}": f"{{{policy}[moves]:.0f}}" for policy in shown[:2]},
            },
            points.values(),
        ),
    ]


def residency(result: dict[str, Any]) -> list[str]:
    """Experts in GPU memory, by routing and by what was known at the start."""
    return section(
        f"{result['model']}: experts in GPU memory, by routing",
        f"{result['share']:.0%} of the experts are there. Cold: a start with any experts; learned: the last of some "
        "rounds; known: a start with the experts that were used most in these. Found: share of uses there; CPU: what "
        f"its experts read in the round; bus: what came to the GPU. Rounds of {result['output_tokens']} tokens after "
        f"random prompts of {result['prompt_tokens']}; {graphics(result)}; {taken(result)}. {result.get('note', '')} "
        f"`{result['command']}`",
        {
            "routing": "{routing}", "start": "{start}", **_STEP, **_FASTEST,
            "found": lambda row: "-" if row["found"] is None else f"{row['found']:.1%}",
            "moves": "{moves:.0f}", "CPU GB": "{cpu_experts_gb:.1f}", "CPU s": "{cpu_experts_s:.2f}",
            "bus GB": "{bus_gb:.1f}", "fetched": "{fetched_share:.0%}", **_PROBE,
        },
        result["figures"],
        words=2,
    )  # fmt: skip


def launches(result: dict[str, Any]) -> list[str]:
    """When decode steps are launched."""
    by_rows: dict[tuple[str, int], dict[str, Any]] = {}
    for measured in result["decode"]:
        row = by_rows.setdefault((measured["sampling"], measured["rows"]), {"same": "yes"})
        row |= {"sampling": measured["sampling"], "rows": measured["rows"], measured["launch"]: measured}
        row["same"] = row["same"] if measured["same_tokens"] else "no"
    lines = section(
        f"{result['model']}: when the next step is launched",
        f"All experts on the GPU. Ahead: before the tokens of a step are read; early: after that; late: by the caller. "
        f"The best of turns, {result['output_tokens']} tokens after prompts of {result['prompt_tokens']}; sampled: "
        f"with top_k and top_p; same: the tokens of all are equal. {graphics(result)}; {taken(result)}. "
        f"{result.get('note', '')} `{result['command']}`",
        {
            "sampling": "{sampling}", "rows": "{rows}",
            **{f"{way} tok/s": f"{{{way}[tokens_per_second]:.0f}}" for way in LAUNCHES},
            **{f"{way} ms": f"{{{way}[step_ms]:.2f}}" for way in LAUNCHES},
            "same": "{same}",
        },
        [*by_rows.values()],
        words=1,
    )  # fmt: skip
    if not result.get("traced"):  # the run was interrupted
        return lines
    parts = list(result["traced"][0]["ms"])
    traced: Columns = {
        "launch": "{launch}", "rows": "{rows}", "step": "{step_ms:.2f}", "traced": "{traced_step_ms:.2f}",
        "kernels": "{kernels:.0f}", **{part: f"{{ms[{part}]:.2f}}" for part in parts},
    }  # fmt: skip
    return [*lines, "", "Milliseconds of a greedy step by CUDA's profiler:", *table(traced, result["traced"], words=1)]


def trials(result: dict[str, Any]) -> list[str]:
    """Ways to compute a step beside each other."""
    lines = section(
        f"{result['model']}: trials, with {result['rules']} rules",
        f"Ways to compute a step, each between runs with none; all experts on the GPU. The best of turns, greedy, "
        f"{result['output_tokens']} tokens after prompts of {result['prompt_tokens']}; same: the tokens of the first "
        f"run. Prompts alone: the fastest, and the median, to which a first one that compiles belongs. "
        f"{graphics(result)}; {taken(result)}. {result.get('note', '')} `{result['command']}`",
        {"trial": "{trial}", **_STEP, **_FASTEST, "same": lambda row: "yes" if row["same_tokens"] else "no"},
        _of_runs(result, "decode"),
        words=1,
    )
    prefill: Columns = {
        "trial": "{trial}", "prompt": "{tokens}", "tok/s": "{tokens_per_second:.0f}", "median": "{median_ms:.0f} ms",
    }  # fmt: skip
    if prompts := _of_runs(result, "prefill"):
        lines += ["", *table(prefill, prompts, words=1)]
    if traced := _of_runs(result, "traced"):
        parts: Columns = {part: f"{{ms[{part}]:.2f}}" for part in traced[0]["ms"]}
        columns: Columns = {"trial": "{trial}", "rows": "{rows}", "step": "{step_ms:.2f}", "kernels": "{kernels:.0f}"}
        lines += ["", "Milliseconds of a step by CUDA's profiler:", "", *table({**columns, **parts}, traced, words=1)]
    return lines


def _of_runs(result: dict[str, Any], part: str) -> list[dict[str, Any]]:
    return [{"trial": run["trial"], **row} for run in result["runs"] for row in run[part]]


def expert_tiles(result: dict[str, Any]) -> list[str]:
    """The fastest tiles of packed experts, by rows."""
    best: list[dict[str, Any]] = []
    for rows in dict.fromkeys(figure["rows"] for figure in result["figures"]):
        timed = [figure for figure in result["figures"] if figure["rows"] == rows and "layer_us" in figure]
        ordered = sorted(timed, key=lambda figure: float(figure["layer_us"]))
        best += [figure for place, figure in enumerate(ordered) if place < SHOWN or figure["choice"] == "as used"]
    return section(
        f"Tiles of packed experts, {result['shape']}",
        f"Microseconds of a layer's experts, in a graph of {result['layers']} layers. GB/s: what they read, each used "
        f"expert once. As used: the tiles of that commit. Beside them the {SHOWN} fastest choices are shown. Error: "
        f"the largest of a pair, relative. A sum over memory read {result['probe']['read_gb_s']:.0f} GB/s. "
        f"{graphics(result)}; {taken(result)}. {result.get('note', '')} `{result['command']}`",
        {
            "rows": "{rows}", "tiles": "{choice}", "experts": "{experts:.1f}", "us": "{layer_us:.1f}",
            "GB/s": "{gb_s:.0f}", "error": "{error:.4f}",
        },
        best,
    )  # fmt: skip


def served(result: dict[str, Any]) -> list[str]:
    """The whole system on a GPU, beside its engine alone."""
    lines = section(
        f"{result['model']}, served",
        f"Redis, gateway and one worker on {graphics(result)}; {taken(result)}. All clients ask at once, for "
        f"{result['tokens']} tokens after prompts of {result['prompt_tokens']}, experts on the CPU. Engine: given the "
        f"same requests in one process; probe: what all threads read a second just after. `{result['command']}`",
        {
            "clients": "{clients}", "tok/s": "{tokens_per_second:.1f}", "engine": "{engine_alone:.1f}",
            "of it": "{share_of_engine:.0%}",
            "first token p50, p99": "{first_token_p50_ms:.0f}, {first_token_p99_ms:.0f} ms",
            "between tokens": "{between_tokens_p50_ms:.1f}, {between_tokens_p99_ms:.1f} ms",
            "CPU's experts a layer": "{distinct_experts:.1f}", "probe": "{bandwidth_gb_s:.0f} GB/s",
        },
        result["figures"],
    )  # fmt: skip
    by_clients = {row["clients"]: row for row in result["figures"]}
    if by_clients.keys() >= {1, 4}:
        tokens, used = (by_clients[4][key] / by_clients[1][key] for key in ("tokens_per_second", "distinct_experts"))
        lines += ["", f"4 clients together get {tokens:.2f} times the tok/s of 1; a layer of a step then needs "
                      f"{used:.1f} times as many different experts of the CPU."]  # fmt: skip
    return lines


def backlog(result: dict[str, Any]) -> list[str]:
    """A batch through the gateway, beside interactive requests, and the engine alone if it was measured."""
    probes = ", ".join(f"{probe:.0f}" for probe in result["probe_gb_s"])
    lines = section(
        f"{result['model']}, a backlog beside a chat",
        f"Redis, gateway, control worker and one worker with default settings on {graphics(result)}; {taken(result)}. "
        f"A batch of completions: {result['tokens']} tokens after prompts of {result['prompt_tokens']}, experts on the "
        f"CPU. Interactive requests: {result['rate']:g} a second, {result['chat_tokens']} tokens after prompts of "
        f"{result['prompt_tokens']}. Memory read {probes} GB/s meanwhile. {result.get('note', '')} "
        f"`{result['command']}`",
        {"batch": "{what}", "lines": "{total}", "tok/s": "{tokens_per_second:.0f}", "seconds": "{seconds:.0f}"},
        [
            {"what": what, **result[key]}
            for what, key in (("alone", "batch_alone"), ("beside chat", "batch_beside_chat"))
            if key in result
        ],
        words=1,
    )
    percents = "{{{0}_p50_ms:.0f}}, {{{0}_p95_ms:.0f}}, {{{0}_p99_ms:.0f}} ms"
    chat: Columns = {
        "chat": "{what}",
        "requests": "{requests}",
        "first token p50, p95, p99": percents.format("first_token"),
        "between tokens p50, p95, p99": percents.format("between_tokens"),
    }
    parts = (("alone", "chat_alone"), ("beside batch", "chat_beside_batch"))
    lines += ["", *table(chat, [{"what": what, **result[key]} for what, key in parts if key in result], words=1)]
    if whole := result.get("engine_alone"):
        share = result.get("share_of_engine")
        reached = "" if share is None else f" The batch alone reached {100 * share:.0f} % of that."
        lines += [
            "",
            f"The engine alone computes {whole['lines']:,} such lines at {whole['tokens_per_second']:.0f} tok/s, with "
            f"{whole['rows']:,} rows.{reached} These "
            "are decode steps of the engine. Reading experts once: from host memory, at the probed rate, if their size "
            "is known. On a GPU larger steps stream experts over the bus, too.",
            "",
            *table(ROWS_ALONE, [{**row, **_reading(row, whole)} for row in result["rows_alone"]]),
        ]
    return lines


def overlap(result: dict[str, Any]) -> list[str]:
    """Interactive rows alone, and beside a batch in two ways."""

    def both(name: str) -> Callable[[Row], str]:
        shown = f"{{{name}_p50_ms:.0f}}, {{{name}_p95_ms:.0f}} ms"
        return lambda row: shown.format(**row) if f"{name}_p50_ms" in row else "-"

    columns: Columns = {
        "way": "{way}", "interactive rows": "{rows}",
        "first token p50, p95": both("first_token"), "between tokens p50, p95": both("between_tokens"),
        "tok/s of them": "{interactive_tokens_per_second:.1f}", "of the batch": "{batch_tokens_per_second:.0f}",
        **_PROBE,
    }  # fmt: skip
    return section(
        f"{result['model']}, interactive rows beside a batch",
        f"The engine alone, experts in host memory; a batch of {result['batch']:,} rows that decode. So many "
        f"interactive rows at any time, with prompts of {result['prompt_tokens']} tokens and {result['output_tokens']} "
        "more. Overlapping: steps of both classes at the same time; shared: steps of both together. The first prompts "
        f"of a way come at once, and compile. {graphics(result)}; {taken(result)}. {result.get('note', '')} "
        f"`{result['command']}`",
        columns,
        result["figures"],
        words=1,
    )


ROWS_ALONE: Columns = {
    "rows": "{rows}",
    "ms a step": "{step_ms:.0f}",
    "tok/s": "{tokens_per_second:.0f}",
    "memory, GB/s": "{probe_gb_s:.0f}",
    "reading experts once, ms": "{reading}",
    "s for all prompts": "{prompt_seconds:.2f}",
    "host's share": "{host_share:.1%}",
}


def _reading(row: Row, whole: Row) -> Row:
    """The milliseconds in which the host reads every expert once."""
    size = whole["expert_bytes"]
    return {"reading": "" if size is None else f"{size / row['probe_gb_s'] / 1e6:.0f}"}


def attention(result: dict[str, Any]) -> list[str]:
    """Attention backends beside each other."""
    environment, figures = result["environment"], result["figures"]
    names = [f"{figure['backend']}, {figure['cache']}" for figure in figures]
    packages = environment["packages"]
    lines = [
        "### Attention backends",
        f"Microseconds of one layer of Qwen3-30B-A3B's shape (32 heads, 4 of keys, 128 wide); in brackets the GB/s of "
        f"keys and values, or TFLOP/s. Decode is captured in a CUDA graph, but for torch. {environment['gpu']['name']},"
        f" torch {packages['torch']}, triton {packages['triton']}, FlashInfer {packages['flashinfer-python']}; "
        f"{taken(result)}. `{result['command']}`",
    ]
    for part, sizes, rate in (("decode", ("rows", "keys"), "gb_s"), ("prefill", ("tokens",), "tflop_s")):
        points = {tuple(row[size] for size in sizes): {**row} for row in figures[0][part]}
        for name, figure in zip(names, figures, strict=True):
            for row in figure[part]:
                points[tuple(row[size] for size in sizes)][name] = f"{row['layer_us']:.1f} ({row[rate]:.0f})"
        heads = {size: f"{{{size}}}" for size in sizes}
        lines += ["", *table({**heads, **{name: f"{{{name}}}" for name in names}}, points.values())]
    plans = [
        f"{name} {median(row['plan_us'] for row in figure['decode']):.0f}"
        for name, figure in zip(names, figures, strict=True)
    ]
    return [*lines, "", f"Host's time for the plan of a decode step, median, in us: {'; '.join(plans)}."]


def graphics(result: Row) -> str:
    """The GPU, if there is one, and its host."""
    environment = result["environment"]
    gpu = "" if environment["gpu"] is None else f"{environment['gpu']['name']}, "
    return f"{gpu}{environment['cpu']}, {environment['threads']} threads"


def taken(result: Row) -> str:
    """When a result was measured, on which commit."""
    return f"commit {result['machine']['commit']}, {result['machine']['taken']}"
