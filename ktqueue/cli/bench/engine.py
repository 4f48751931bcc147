"""`ktqueue bench engine`: tokens per second of a model on this machine, for decode and prefill."""

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ktqueue.cli.bench.arguments import STANDARD_OUTPUT, numbers, write_report
from ktqueue.cli.flags import CommonFlags, EngineFlags, ProfileFlags, expand, settings
from ktqueue.cli.model import with_model
from ktqueue.cli.terminal.console import results, table
from ktqueue.cli.terminal.failures import check_output

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ktqueue.bench.engine import Decode, Prefill
    from ktqueue.core.config import EngineConfig

MAX_NUMBER = 1 << 20
_WHAT = "What to measure"


@expand
def engine(
    common: CommonFlags,
    engine: EngineFlags,
    profile: ProfileFlags,
    rows: Annotated[
        str,
        typer.Option(
            metavar="NUMBERS", help="Sequences that decode together, separated by commas.", rich_help_panel=_WHAT
        ),
    ] = "1,4,16",
    prompt_tokens: Annotated[
        int, typer.Option(min=1, max=MAX_NUMBER, metavar="N", help="Tokens of each row.", rich_help_panel=_WHAT)
    ] = 128,
    output_tokens: Annotated[
        int, typer.Option(min=2, max=MAX_NUMBER, metavar="N", help="Tokens of each row.", rich_help_panel=_WHAT)
    ] = 64,
    prefill: Annotated[
        str,
        typer.Option(
            metavar="NUMBERS", help="Lengths of prompts that run alone, in tokens; 0: none.", rich_help_panel=_WHAT
        ),
    ] = "512,2048",
    rounds: Annotated[
        int,
        typer.Option(
            min=1, max=1000, metavar="N", help="Measurements of each point; the best is shown.", rich_help_panel=_WHAT
        ),
    ] = 3,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write JSON to a file; - is standard output, without tables."),
    ] = None,
) -> None:
    """Measure a model's engine without Redis: rows that decode together, and prompts that run alone.

    Prompts are random tokens, so no two share a prefix. --model synthetic:qwen3-30b-a3b:q4_k_m measures random weights
    in that shape, made in memory. The cache has the size that the rows need, unless a flag sets it.
    """
    check_output(json_file or STANDARD_OUTPUT)
    # What follows imports torch, which takes seconds.
    from ktqueue.bench.engine import measure_decode, measure_prefill, prompts
    from ktqueue.bench.environment import environment
    from ktqueue.cli.terminal.progress import Bar
    from ktqueue.profiling.writer import prepare_folder
    from ktqueue.workers.startup.build import build
    from ktqueue.workers.startup.profile import start_profile
    from ktqueue.workers.startup.routing_file import start_routing

    row_counts, lengths = _numbers("--rows", rows), [n for n in _numbers("--prefill", prefill, least=0) if n]
    everything = with_model(settings(common, engine=engine, profile=profile))
    chosen = everything.engine
    config = _sized(chosen, engine, row_counts, lengths, prompt_tokens + output_tokens)
    load_before = os.getloadavg()[0]
    prepare_folder(everything.profile)
    with Bar("loading", in_bytes=True) as bar:
        built = build(config, bar.update, named_ranges=everything.profile.folder is not None)
    writer = start_profile(everything.profile, built, "bench")
    routing = start_routing(config, built.model, built.engine)
    size, decoded, filled = built.tokenizer.size, [], []
    try:
        with Bar("measuring", rounds * len(row_counts) + len(lengths)) as bar:
            for place, count in enumerate(row_counts):
                measured = []
                for again in range(rounds):
                    bar.update(place * rounds + again, note=f"{count} rows")
                    row_prompts = prompts(count, prompt_tokens, size, seed=again)
                    measured.append(measure_decode(built.engine, row_prompts, output_tokens))
                decoded.append(max(measured, key=lambda figure: figure.tokens_per_second))
            for place, length in enumerate(lengths):
                bar.update(rounds * len(row_counts) + place, note=f"prompt of {length}")
                filled.append(measure_prefill(built.engine, prompts(rounds + 1, length, size)))
            bar.update(rounds * len(row_counts) + len(lengths))
    finally:  # an interrupted run shows the figures that it has
        built.engine.close()
        for record in (writer, routing):
            if record is not None:
                record.close()
        if json_file != STANDARD_OUTPUT:
            _show(decoded, filled)
        if json_file is not None:
            write_report(
                json_file,
                {
                    **environment(),
                    "load_before": round(load_before, 2),
                    "load_after": round(os.getloadavg()[0], 2),
                    "engine": asdict(built.config),
                    "output_tokens": output_tokens,
                    "rounds": rounds,
                    "decode": [
                        {**asdict(row), "tokens_per_second": row.tokens_per_second, "host_share": row.host_share}
                        for row in decoded
                    ],
                    "prefill": [{**asdict(row), "tokens_per_second": row.tokens_per_second} for row in filled],
                },
            )


def _sized(
    config: "EngineConfig", flags: EngineFlags, rows: list[int], lengths: list[int], row_tokens: int
) -> "EngineConfig":
    """Return the settings with enough rows, tokens and pages for the measurements, unless flags set them."""
    longest = max([*lengths, row_tokens])
    pages = max(max(rows) * -(-row_tokens // config.page_size), -(-(longest + 1) // config.page_size)) + 1
    sized = replace(config, enable_prefix_caching=False, max_num_seqs=max(config.rows, *rows))
    if flags.max_num_batched_tokens is None:
        sized = replace(sized, max_num_batched_tokens=max(config.step_tokens, sized.rows, *lengths))
    if flags.kv_cache_bytes is None and config.num_pages is None:
        sized = replace(sized, num_pages=pages)
    return sized


def _show(decoded: "list[Decode]", filled: "list[Prefill]") -> None:
    console = results()
    heads = ["rows", "prompt", "tok/s", "ms a step", "fastest", "host", "first token"]
    with_experts = any(row.experts.get("uses") for row in decoded)  # a GPU has or copies some
    heads += ["found", "GPU experts", "MB fetched"] if with_experts else []
    listing = table(heads, right=heads)
    for row in decoded:
        listing.add_row(
            str(row.rows),
            str(row.prompt_tokens),
            f"{row.tokens_per_second:,.1f}",
            f"{row.step * 1e3:,.2f}",
            f"{row.fastest_step * 1e3:,.2f}",
            f"{row.host_share:.0%}",
            f"{row.first_token * 1e3:,.0f} ms",
            *(_experts(row.experts) if with_experts else ()),
        )
    console.print(listing)
    if filled:
        console.print()
        columns = ("prefill", "tok/s", "ms", "fastest")
        rows = [
            (str(f.tokens), f"{f.tokens_per_second:,.0f}", f"{f.seconds * 1e3:,.0f}", f"{f.fastest * 1e3:,.0f}")
            for f in filled
        ]
        console.print(table(columns, rows, right=columns))


def _experts(counts: "Mapping[str, float]") -> tuple[str, str, str]:
    """The share of uses that were in GPU memory, and of one step the experts computed there and the bytes fetched."""
    uses, experts, fetched = (counts.get(name) for name in ("uses", "gpu_experts", "fetched_bytes"))
    return (
        f"{counts['uses_on_gpu'] / uses:.1%}" if uses else "",
        "" if experts is None else f"{experts:,.0f}",
        "" if fetched is None else f"{fetched / 1e6:,.1f}",
    )


def _numbers(flag: str, text: str, least: int = 1) -> list[int]:
    """The numbers of a comma-separated list that is not empty."""
    return list(numbers(flag, text, least=least, most=MAX_NUMBER, may_be_empty=False))
