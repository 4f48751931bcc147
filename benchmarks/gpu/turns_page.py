"""Sections of a GPU's pages for what is measured in turns: beside-llama-*, drafts-* and prefill-*."""

from typing import Any

from benchmarks.gpu.page import graphics, taken
from benchmarks.tables import Columns, section, table


def beside_llama(result: dict[str, Any]) -> list[str]:
    """Our engine and llama.cpp's programs."""
    columns: Columns = {
        "ktqueue": "{ours:.0f}", "llama.cpp": lambda row: f"{row['llama.cpp']:.0f}", "ratio": "{ratio:.2f}",
        "every turn of ktqueue": lambda row: _turns(row, "ours"), "of llama.cpp": lambda row: _turns(row, "llama.cpp"),
    }  # fmt: skip
    rows = [row for row in result["figures"] if row["part"] == "rows"]
    prompts = [row for row in result["figures"] if row["part"] == "prompts"]
    return [
        *section(
            f"{result['model']}, experts on the {result['experts']}",
            f"Tokens a second, medians of {result['turns']} turns. Rows decode {result['output_tokens']} tokens after "
            f"prompts of {result['prompt_tokens']}; llama-batched-bench decodes random tokens, and samples none. "
            f"Rules of ktqueue: {result['rules']}. {graphics(result)}; {taken(result)}. {result.get('note', '')} "
            f"`{result['command']}`",
            {"rows": "{number}", **columns},
            rows,
        ),
        "",
        "Prompts that are read alone, the fastest of a turn, by llama-bench with the faster of its batch sizes:",
        "",
        *table({"tokens": "{number}", **columns}, prompts),
    ]


def _turns(row: dict[str, Any], engine: str) -> str:
    return ", ".join(f"{speed:.0f}" for speed in row["every_turn"][engine])


def drafts(result: dict[str, Any]) -> list[str]:
    """What drafts gain, by the place of experts and the text."""
    lookup = [row for row in result["figures"] if row["drafts"] == "lookup"]
    model = [row for row in result["figures"] if row["drafts"] == "model"]
    more: Columns = {
        "with": "{with:.1f}", "gain": "{gain:+.1%}", "steps off": "{steps_off}", "steps": "{steps}",
        "right of drafts": "{accepted} of {drafted}", "launched ahead": "{steps_ahead}",
    }  # fmt: skip
    first: Columns = {"GiB for experts": "{expert_gib}", "rows": "{rows}"}
    lines = section(
        f"{result['model']}: drafts",
        "By lookup: a known part of a text's tokens repeats the one 24 places before. Tokens a second, medians of "
        f"{result['turns']} turns without and with drafts; gain: the median of the turns. {result['output_tokens']} "
        f"tokens a row; 0 GiB: all experts on the CPU. {graphics(result)}; {taken(result)}. {result.get('note', '')} "
        f"`{result['command']}`",
        {**first, "repeated": "{repeated:.0%}", "off": "{off:.1f}", **more},
        lookup,
    )
    if model:
        text = f"By the draft model {result['draft_model']}, whose tokens are replaced by so many right ones:"
        lines += ["", text, "", *table({**first, "right": "{right:.0%}", "off": "{off:.1f}", **more}, model)]
    return lines


def prefill(result: dict[str, Any]) -> list[str]:
    """Prompts that are read alone, by the place of experts and the most tokens of a step."""
    routing = "that of a trace" if ":routing=" in result["model"] else "uniform"
    return section(
        f"{result['model']}: prompts alone",
        f"The median of {result['prompts']} prompts, to the first token, in the median of {result['turns']} turns. "
        "Bus: what came over it for a prompt, and a second of the whole prompt. CPU: weights of experts that it read. "
        f"Probe: what all its threads read a second. Routing is {routing}. "
        f"{graphics(result)}; {taken(result)}. {result.get('note', '')} `{result['command']}`",
        {
            "experts on the": "{experts}", "tokens": "{tokens}", "most of a step": "{step_tokens}",
            "tok/s": "{tokens_per_second:.0f}", "ms": "{ms:.0f}", "steps": "{steps:.0f}", "bus GB": "{bus_gb:.1f}",
            "bus GB/s": "{bus_gb_s:.1f}", "CPU GB": "{cpu_gb:.1f}", "probe GB/s": "{dram_gb_s:.0f}",
        },
        result["figures"],
        words=1,
    )  # fmt: skip
