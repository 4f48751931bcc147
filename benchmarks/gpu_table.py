"""The tables of a GPU worker's engine, from results/gpu.json."""

from typing import Any


def make(result: dict[str, Any]) -> list[str]:
    """The lines of the tables."""
    facts, machine = result["environment"], result["machine"]
    gpu, packages = facts["gpu"], facts["packages"]
    lines = [
        f"### {result['model']}, on a GPU",
        f"{gpu['name']}, CUDA {gpu['cuda']}; {facts['cpu']}, {facts['threads']} threads, {facts['isa']}; torch "
        f"{packages['torch']}, triton {packages['triton']}, FlashInfer {packages['flashinfer-python']}; commit "
        f"{machine['commit']}, {machine['taken']}. Prompts of 128 tokens, greedy. `{result['command']}`",
        "",
        "All experts on the CPU. CPU: what the expert layers read a second, prompts included; probe: what all threads "
        "read just after.",
        "",
        "| rows | tok/s | step | fastest | host | CPU GB/s | probe |",
        "|" + " ---: |" * 7,
    ]
    lines += [
        f"| {one['rows']} | {one['tokens_per_second']:.1f} | {one['step_ms']:.2f} ms | "
        f"{one['fastest_step_ms']:.2f} ms | {one['host_share']:.1%} | {one['cpu_experts_gb_s']:.0f} | "
        f"{one['dram_gb_s']:.0f} |"
        for one in result["decode"]
    ]
    lines += ["", "| prompt | tok/s | ms | fastest |", "|" + " ---: |" * 4]
    lines += [
        f"| {one['tokens']} | {one['tokens_per_second']:.0f} | {one['ms']:.0f} | {one['fastest_ms']:.0f} |"
        for one in result["prefill"]
    ]
    if result["curve"]:
        lines += ["", "| experts in GPU memory | rows | tok/s | step | hit rate |", "|" + " ---: |" * 5]
    for one in result["curve"]:
        hits = f"{one['expert_hit_rate']:.0%}" if "expert_hit_rate" in one else "-"
        lines.append(
            f"| {one['expert_memory_gib']:.1f} GiB | {one['rows']} | {one['tokens_per_second']:.1f} | "
            f"{one['step_ms']:.2f} ms | {hits} |"
        )
    return lines
