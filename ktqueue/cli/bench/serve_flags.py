"""The flags of `ktqueue bench serve`, with the names of `vllm bench serve`."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

DEFAULT_REQUESTS = 100
DEFAULT_OUTPUT_TOKENS = 128
MAX_TOKENS = 1 << 22


def _options(panel: str) -> Any:
    def option(*names: str, help: str, metavar: str | None = None, shown: str | bool = True, **more: Any) -> Any:  # noqa: A002
        return typer.Option(*names, help=help, metavar=metavar, show_default=shown, rich_help_panel=panel, **more)

    return option


_server, _load, _prompts, _result = map(_options, ("Server", "Load", "Prompts", "Result"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFlags:
    """The server, and what all requests have in common."""

    url: Annotated[str, _server("--url", "--base-url", help="The server, with or without /v1.", metavar="URL")] = (
        "http://127.0.0.1:8000"
    )
    model: Annotated[str | None, _server("--model", help="The model's name.", metavar="NAME", shown="the only one")] = (
        None
    )
    backend: Annotated[str, _server("--backend", help="openai: completions. openai-chat: chat.", metavar="NAME")] = (
        "openai"
    )
    endpoint: Annotated[
        str | None, _server("--endpoint", help="Path of the endpoint.", metavar="PATH", shown="the backend's")
    ] = None
    api_key: Annotated[
        str | None, _server("--api-key", help="The server's key.", metavar="KEY", shown=False, envvar="OPENAI_API_KEY")
    ] = None
    header: Annotated[
        list[str] | None, _server("--header", help="A header; may be repeated.", metavar="KEY=VALUE", shown=False)
    ] = None
    extra_body: Annotated[
        str | None, _server("--extra-body", help="Fields of each body; null removes one.", metavar="JSON", shown=False)
    ] = None
    temperature: Annotated[
        float | None, _server("--temperature", help="0 is greedy.", metavar="X", shown="the server's")
    ] = None
    ignore_eos: Annotated[bool, _server("--ignore-eos", help="Ask for answers of the full length.")] = False
    job_class: Annotated[
        str | None, _server("--class", help="interactive or batch: for ktqueue.", metavar="CLASS", shown=False)
    ] = None
    priority: Annotated[
        int | None, _server("--priority", help="Priority of the requests.", metavar="N", shown=False)
    ] = None
    insecure: Annotated[bool, _server("--insecure", help="Do not check certificates.")] = False
    timeout: Annotated[float, _server("--timeout", help="Time limit of a request.", metavar="S", min=0.1)] = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFlags:
    """How many requests are sent, and when."""

    num_prompts: Annotated[
        int | None,
        _load(
            "--num-prompts",
            help="Number of requests.",
            metavar="N",
            shown=f"{DEFAULT_REQUESTS}, or all of the trace",
            min=1,
            max=1_000_000,
        ),
    ] = None
    max_concurrency: Annotated[
        int | None,
        _load("--max-concurrency", help="Requests at once.", metavar="N", shown="no limit", min=1, max=100_000),
    ] = None
    request_rate: Annotated[
        float, _load("--request-rate", help="Requests a second; inf: all at once.", metavar="R")
    ] = math.inf
    burstiness: Annotated[
        float, _load("--burstiness", help="Shape of the gaps' gamma distribution; below 1: bursts.", metavar="B")
    ] = 1.0
    trace: Annotated[
        Path | None, _load("--trace", help="Arrivals and lengths: CSV or JSON lines.", metavar="FILE", shown=False)
    ] = None
    trace_speed: Annotated[float, _load("--trace-speed", help="Replay it so many times as fast.", metavar="X")] = 1.0
    num_warmups: Annotated[
        int, _load("--num-warmups", help="Requests before it that do not count.", metavar="N", min=0, max=10_000)
    ] = 1
    seed: Annotated[
        str | None, _load("--seed", help="Same seed, same prompts: caches help then.", metavar="N", shown="a new one")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFlags:
    """What the prompts are, and how long."""

    dataset_name: Annotated[str, _prompts("--dataset-name", help="random, sharegpt or custom.", metavar="NAME")] = (
        "random"
    )
    dataset_path: Annotated[
        Path | None, _prompts("--dataset-path", help="The file of the others.", metavar="FILE", shown=False)
    ] = None
    input_len: Annotated[
        int,
        _prompts("--random-input-len", "--input-len", help="Tokens of a prompt.", metavar="N", min=1, max=MAX_TOKENS),
    ] = 256
    output_len: Annotated[
        int | None,
        _prompts(
            "--random-output-len",
            "--output-len",
            help="Tokens of an answer.",
            metavar="N",
            shown=f"{DEFAULT_OUTPUT_TOKENS}, or as in the file",
            min=1,
            max=MAX_TOKENS,
        ),
    ] = None
    range_ratio: Annotated[
        float, _prompts("--random-range-ratio", help="Lengths vary by this share.", metavar="R", min=0.0, max=1.0)
    ] = 0.0
    prefix_len: Annotated[
        int,
        _prompts("--random-prefix-len", help="Tokens before it that all share.", metavar="N", min=0, max=MAX_TOKENS),
    ] = 0
    tokenizer: Annotated[
        str | None,
        _prompts("--tokenizer", help="A model, for exact lengths.", metavar="MODEL", shown="as the server counts"),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFlags:
    """What is shown and written."""

    goodput: Annotated[
        list[str] | None,
        _result("--goodput", help="Limit of ttft, tpot or e2el; may be repeated.", metavar="METRIC:MS", shown=False),
    ] = None
    percentile_metrics: Annotated[str, _result("--percentile-metrics", help="Metrics to show.", metavar="NAMES")] = (
        "ttft,tpot,itl,e2el"
    )
    metric_percentiles: Annotated[
        str, _result("--metric-percentiles", help="Percentiles to show.", metavar="NUMBERS")
    ] = "90,95,99"
    compare: Annotated[
        Path | None, _result("--compare", help="Show ratios to this result.", metavar="FILE", shown=False)
    ] = None
    json_file: Annotated[
        Path | None,
        _result(
            "--json",
            "--save-result",
            help="Write JSON to a file; - is standard output, without tables.",
            metavar="FILE",
            shown=False,
        ),
    ] = None
