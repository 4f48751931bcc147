"""The tables of a GPU worker's engine, from results/gpu.json."""

from statistics import median
from typing import Any


def make(result: dict[str, Any]) -> list[str]:
    """The lines of the tables. An interrupted run has less in its result, and gets fewer."""
    facts, machine = result["environment"], result["machine"]
    gpu, packages = facts["gpu"], facts["packages"]
    lines = [
        f"### {result['model']}, on a GPU",
        f"{gpu['name']}, CUDA {gpu['cuda']}; {facts['cpu']}, {facts['threads']} threads, {facts['isa']}; torch "
        f"{packages['torch']}, triton {packages['triton']}, FlashInfer {packages['flashinfer-python']}; commit "
        f"{machine['commit']}, {machine['taken']}. Prompts of 128 tokens, greedy. `{result['command']}`",
        *([result["note"]] if "note" in result else []),
        "",
        "All experts on the CPU. Fetched: the share of a step's experts that come over the bus; CPU: what the expert "
        "layers there read a second, prompts included; probe: what all threads read just after.",
        "",
        "| rows | tok/s | step | fastest | host | fetched | CPU GB/s | probe |",
        "|" + " ---: |" * 8,
    ]
    lines += [
        f"| {one['rows']} | {one['tokens_per_second']:.1f} | {one['step_ms']:.2f} ms | "
        f"{one['fastest_step_ms']:.2f} ms | {one['host_share']:.1%} | {one['expert_fetched_share']:.0%} | "
        f"{one['cpu_experts_gb_s']:.0f} | "
        f"{one['dram_gb_s']:.0f} |"
        for one in result["decode"]
    ]
    if result.get("prefill"):
        lines += ["", "| prompt | tok/s | ms | fastest |", "|" + " ---: |" * 4]
        lines += [
            f"| {one['tokens']} | {one['tokens_per_second']:.0f} | {one['ms']:.0f} | {one['fastest_ms']:.0f} |"
            for one in result["prefill"]
        ]
    if result.get("prefetch"):
        lines += ["", "Experts fetched into the CPU's caches while the GPU attends, in turns with none. Right: of the "]
        lines[-1] += "experts that were predicted, those that were used."
        lines += ["", "| expert prefetch | rows | tok/s | step | fastest | right | fetched | probe |"]
        lines += ["| --- |" + " ---: |" * 7]
        lines += [
            f"| {'on' if one['expert_prefetch'] else 'off'} | {one['rows']} | {one['tokens_per_second']:.1f} | "
            f"{one['step_ms']:.2f} ms | {one['fastest_step_ms']:.2f} ms | {_rate(one.get('expert_prediction_rate'))} | "
            f"{one['expert_fetched_share']:.0%} | {one['dram_gb_s']:.0f} |"
            for one in result["prefetch"]
        ]
    if result.get("overlap"):
        lines += [
            "",
            "Decode steps in halves that take turns on GPU and CPU (`--two-batch-overlap`). Cut: the share of ",
        ]
        lines[-1] += "steps that ran so."
        lines += ["", "| two-batch overlap | rows | prompts | tok/s | step | fastest | cut | fetched | probe |"]
        lines += ["| --- |" + " ---: |" * 8]
        lines += [
            f"| {one['two_batch_overlap']} | {one['rows']} | {one['prompt_tokens']} | {one['tokens_per_second']:.1f} | "
            f"{one['step_ms']:.2f} ms | {one['fastest_step_ms']:.2f} ms | {one['overlapped']:.0%} | "
            f"{one['expert_fetched_share']:.0%} | {one['dram_gb_s']:.0f} |"
            for one in result["overlap"]
        ]
    if result.get("deferred"):
        lines += ["", "| deferred experts of a token | rows | tok/s | step | fetched |", "|" + " ---: |" * 5]
        lines += [
            f"| {one['deferred_experts']} | {one['rows']} | {one['tokens_per_second']:.1f} | {one['step_ms']:.2f} ms | "
            f"{one['expert_fetched_share']:.0%} |"
            for one in result["deferred"]
        ]
    if result.get("curve"):
        lines += ["", "| experts in GPU memory | rows | tok/s | step | hit rate | fetched |", "|" + " ---: |" * 6]
    for one in result.get("curve", []):
        hits = _rate(one.get("expert_hit_rate"))
        lines.append(
            f"| {one['expert_memory_gib']:.1f} GiB | {one['rows']} | {one['tokens_per_second']:.1f} | "
            f"{one['step_ms']:.2f} ms | {hits} | {one['expert_fetched_share']:.0%} |"
        )
    return lines


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def profile(result: dict[str, Any]) -> list[str]:
    """The lines of the table of where a step's time goes."""
    facts, machine = result["environment"], result["machine"]
    parts = list(result["on_cpu"][0]["ms"])
    lines = [
        f"### {result['model']}: a decode step",
        f"Milliseconds of a step, by CUDA's profiler over {result['steps']} of them, after prompts of "
        f"{result['prompt_tokens']}; {facts['gpu']['name']}, {facts['cpu']}, {facts['threads']} threads; commit "
        f"{machine['commit']}, {machine['taken']}. Gaps: between kernels; long ones, of more than 5 us, are waits "
        f"for the CPU's experts and for the host. CPU: its experts, and what it read of them. `{result['command']}`",
        "",
        f"| experts | rows | step | traced | kernels | {' | '.join(parts)} | CPU | read |",
        "| --- |" + " ---: |" * (len(parts) + 6),
    ]
    for where, figures in (("CPU", result["on_cpu"]), ("GPU", result["on_gpu"])):
        for one in figures:
            told = " | ".join(f"{value:.2f}" for value in one["ms"].values())
            cpu = (
                f"{one['cpu_experts_ms']:.2f} | {one['cpu_experts_gb']:.2f} GB" if "cpu_experts_ms" in one else "- | -"
            )
            lines.append(
                f"| {where} | {one['rows']} | {one['step_ms']:.2f} | {one['traced_step_ms']:.2f} | "
                f"{one['kernels']:.0f} | {told} | {cpu} |"
            )
    return lines


def served(result: dict[str, Any]) -> list[str]:
    """The lines of a whole system's table."""
    facts, machine = result["environment"], result["machine"]
    lines = [
        f"### {result['model']}, served",
        f"Redis, gateway and one worker on {facts['gpu']['name']}, {facts['cpu']}, {facts['threads']} threads; commit "
        f"{machine['commit']}, {machine['taken']}. All clients ask at once, for {result['tokens']} tokens after "
        f"prompts of {result['prompt_tokens']}, experts on the CPU. Engine: given the same requests in one process; "
        f"probe: what all threads read a second just after. `{result['command']}`",
        "",
        "| clients | tok/s | engine | of it | first token p50, p99 | between tokens | CPU's experts a layer | probe |",
        "|" + " ---: |" * 8,
    ]
    lines += [
        f"| {one['clients']} | {one['tokens_per_second']:.1f} | {one['engine_alone']:.1f} | "
        f"{one['share_of_engine']:.0%} | {one['first_token_p50_ms']:.0f}, {one['first_token_p99_ms']:.0f} ms | "
        f"{one['between_tokens_p50_ms']:.1f}, {one['between_tokens_p99_ms']:.1f} ms | {one['distinct_experts']:.1f} | "
        f"{one['bandwidth_gb_s']:.0f} GB/s |"
        for one in result["figures"]
    ]
    by_clients = {one["clients"]: one for one in result["figures"]}
    if by_clients.keys() >= {1, 4}:
        tokens, experts = (by_clients[4][key] / by_clients[1][key] for key in ("tokens_per_second", "distinct_experts"))
        lines += ["", f"4 clients together get {tokens:.2f} times the tok/s of 1; a layer of a step then needs "]
        lines[-1] += f"{experts:.1f} times as many different experts of the CPU."
    return lines


def dense(result: dict[str, Any]) -> list[str]:
    """The lines of the table of dense weights that stay quantised."""
    rows, prompts = (list(result["figures"][0][part]) for part in ("decode_ms", "prefill_ms"))
    heads = [*(f"a step of {count} rows" for count in rows), *(f"a prompt of {count}" for count in prompts)]
    lines = [
        f"### {result['model']}, dense weights as in the file",
        f"{result['machine']}; commit {result['commit']}, {result['taken']}. All experts on the GPU, once each. "
        f"{result['command']}",
        "",
        f"| dense weights | memory | {' | '.join(heads)} |",
        "|" + " ---: |" * (2 + len(heads)),
    ]
    for one in result["figures"]:
        times = [*one["decode_ms"].values(), *one["prefill_ms"].values()]
        told = " | ".join(f"{time:.2f} ms" for time in times)
        lines.append(f"| {one['dense']} | {one['dense_gb']:.2f} GB | {told} |")
    return lines


def attention(result: dict[str, Any]) -> list[str]:
    """The lines of the tables that compare the attention backends."""
    facts, machine, figures = result["environment"], result["machine"], result["figures"]
    columns = [f"{one['backend']}, {one['cache']}" for one in figures]
    lines = [
        "### Attention backends",
        f"Microseconds of one layer of Qwen3-30B-A3B's shape (32 heads, 4 of keys, 128 wide); in brackets the GB/s of "
        f"keys and values, or TFLOP/s. Decode is captured in a CUDA graph, but for torch. {facts['gpu']['name']}, "
        f"torch {facts['packages']['torch']}, triton {facts['packages']['triton']}, FlashInfer "
        f"{facts['packages']['flashinfer-python']}; commit {machine['commit']}, {machine['taken']}. "
        f"`{result['command']}`",
    ]
    for part, sizes, rate in (("decode", ("rows", "keys"), "gb_s"), ("prefill", ("tokens",), "tflop_s")):
        cells = [{tuple(row[size] for size in sizes): row for row in one[part]} for one in figures]
        lines += ["", f"| {' | '.join([*sizes, *columns])} |", "|" + " ---: |" * (len(sizes) + len(columns))]
        for key in cells[0]:
            row = [f"{one[key]['layer_us']:.1f} ({one[key][rate]:.0f})" if key in one else "-" for one in cells]
            lines.append(f"| {' | '.join([*map(str, key), *row])} |")
    hosts = [
        f"{column} {median(row['plan_us'] for row in one['decode']):.0f}"
        for column, one in zip(columns, figures, strict=True)
    ]
    return [
        *lines,
        "",
        f"Host's time for the plan of a decode step, median, in us: {'; '.join(hosts)}.",
    ]
