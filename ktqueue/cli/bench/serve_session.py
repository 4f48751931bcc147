"""One run of `ktqueue bench serve`: checks its flags, asks the server what it needs to know, warms up, measures."""

import asyncio
import math
import resource
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import typer
import uvloop

from ktqueue import __version__
from ktqueue.bench.serving.answer import Backend, RequestForm, refusal
from ktqueue.bench.serving.figures import GOODPUT_METRICS, METRICS, Figures
from ktqueue.bench.serving.http_client import Address, HttpClient, RequestFailure
from ktqueue.bench.serving.load import Target, fetch, run_load, warm_up
from ktqueue.bench.serving.traces import Arrival, read_trace
from ktqueue.bench.serving.words import CountTokens, Words, calibrate
from ktqueue.bench.serving.workload import (
    MAX_REQUESTS,
    DatasetName,
    PlannedRequest,
    RandomLengths,
    arrivals,
    file_requests,
    made_ahead,
    random_requests,
    read_samples,
    trace_requests,
)
from ktqueue.cli.bench.arguments import STANDARD_OUTPUT, write_report
from ktqueue.cli.bench.serve_flags import (
    DEFAULT_OUTPUT_TOKENS,
    DEFAULT_REQUESTS,
    LoadFlags,
    PromptFlags,
    ResultFlags,
    ServerFlags,
)
from ktqueue.cli.bench.serve_tables import read_result, show_comparison, show_figures
from ktqueue.cli.connection import listed_models, one_model
from ktqueue.cli.terminal.failures import ExitCode, UsageFault, check_output
from ktqueue.cli.terminal.progress import Bar
from ktqueue.core.codec import CodecError, loads
from ktqueue.core.errors import InvalidRequest, KtqueueError, Unavailable

OWN_FILES = 64  # open files of this process besides its connections


def run(server: ServerFlags, load: LoadFlags, prompts: PromptFlags, result: ResultFlags) -> None:
    """Measure, then show and write the figures, also if the run is interrupted. Raises KtqueueError."""
    metrics = tuple(_one_of("--percentile-metrics", name, METRICS) for name in _words(result.percentile_metrics))
    percentiles = [_number("--metric-percentiles", word, 0, 100) for word in _words(result.metric_percentiles)]
    limits = dict(_goodput(word) for words in result.goodput or () for word in _words(words))
    check_output(result.json_file or STANDARD_OUTPUT)
    earlier = None if result.compare is None else read_result(result.compare)
    session = Session.prepare(server, load, prompts)
    figures = Figures(limits)
    _allow_files()
    try:
        with Bar("requests", session.count) as bar, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(session.measure(figures, bar))
    finally:
        if figures.ended or figures.interrupted:
            goodput = {metric: limit * 1e3 for metric, limit in limits.items()}  # in ms, as on the command line
            report = {**session.settings(), "goodput": goodput, **figures.report(metrics, percentiles)}
            if result.json_file != STANDARD_OUTPUT:
                show_figures(report, metrics, percentiles)
                if earlier is not None:
                    show_comparison(report, earlier, result.compare)
            if result.json_file is not None:  # the figures are shown even if the disk is full
                write_report(result.json_file, report)
    if not figures.completed:
        raise typer.Exit(ExitCode.FAILED)


@dataclass
class Session:
    """A run: its server, its load and its prompts, checked. `model` is looked up if it is None."""

    address: Address
    endpoint: str
    form: RequestForm
    headers: Mapping[str, str]
    server: ServerFlags
    load: LoadFlags
    prompts: PromptFlags
    seed: str
    dataset: DatasetName
    trace: Sequence[Arrival] | None
    count_tokens: CountTokens | None

    @classmethod
    def prepare(cls, server: ServerFlags, load: LoadFlags, prompts: PromptFlags) -> "Session":
        """Check the flags, and read the trace and the tokenizer. Raises KtqueueError."""
        backend = Backend(_one_of("--backend", server.backend, tuple(Backend)))
        dataset = DatasetName(_one_of("--dataset-name", prompts.dataset_name, tuple(DatasetName)))
        if (prompts.dataset_path is None) != (dataset is DatasetName.RANDOM):
            raise UsageFault("--dataset-path names the file of --dataset-name sharegpt or custom, and only of these")
        for flag, value in (
            ("--request-rate", load.request_rate),
            ("--burstiness", load.burstiness),
            ("--trace-speed", load.trace_speed),
        ):
            if not value > 0:
                raise UsageFault(f"{flag}: must be greater than 0, got {value:g}")
        if load.trace is not None and (math.isfinite(load.request_rate) or dataset is not DatasetName.RANDOM):
            raise UsageFault("--trace has the arrivals and lengths: leave out --request-rate and --dataset-name")
        try:
            address = Address.parse(server.url)
        except ValueError as error:
            raise UsageFault(f"--url: {error}") from error
        return cls(
            address=address,
            endpoint=server.endpoint or backend.endpoint,
            form=RequestForm(backend, server.model or "", server.ignore_eos, _extra(server)),
            headers=_headers(server),
            server=server,
            load=load,
            prompts=prompts,
            seed=load.seed or str(secrets.randbelow(1 << 32)),
            dataset=dataset,
            trace=None if load.trace is None else read_trace(load.trace, load.num_prompts or MAX_REQUESTS),
            count_tokens=None if prompts.tokenizer is None else _tokenizer(prompts.tokenizer),
        )

    @property
    def count(self) -> int:
        """Number of requests."""
        return len(self.trace) if self.trace is not None else self.load.num_prompts or DEFAULT_REQUESTS

    @property
    def lengths(self) -> RandomLengths:
        """Lengths of random prompts."""
        flags = self.prompts
        return RandomLengths(
            flags.input_len, flags.output_len or DEFAULT_OUTPUT_TOKENS, flags.prefix_len, flags.range_ratio
        )

    async def measure(self, figures: Figures, bar: Bar) -> None:
        """Learn what the server does not tell by itself, warm up, and send the load. Raises KtqueueError."""
        try:
            client = HttpClient(
                self.address, self.headers, self.server.timeout, check_certificates=not self.server.insecure
            )
        except ValueError as error:
            raise UsageFault(f"--header: {error}") from error
        try:
            target, requests = await self._prepared(client, bar)
            bar.update(0, note="")
            await run_load(
                target,
                requests,
                figures,
                max_concurrency=self.load.max_concurrency,
                progress=lambda now: bar.update(now.ended, note=_note(now)),
            )
        finally:
            client.close()

    async def _prepared(self, client: HttpClient, bar: Bar) -> tuple[Target, Iterator[PlannedRequest]]:
        try:
            if not self.form.model:
                self.form = RequestForm(
                    self.form.backend, await _only_model(client), self.form.ignore_eos, self.form.extra
                )
            target = Target(client, self.endpoint, self.form)
            bar.update(0, note="counting tokens")
            words = await calibrate(target.prompt_tokens, self.lengths.input_len, self.seed, self.count_tokens)
            if words.is_estimate:
                bar.say("the server does not count tokens of prompts, so each word is taken as one token")
            bar.update(0, note="making prompts")
            requests = made_ahead(self._requests(words))
            bar.update(0, note="warming up")
            warm = random_requests([0.0] * self.load.num_warmups, self.lengths, words, f"{self.seed}:warm-up")
            await warm_up(target, warm, self.load.max_concurrency or self.load.num_warmups)
        except RequestFailure as failure:
            raise _error(self.address, failure) from failure
        return target, requests

    def _requests(self, words: Words) -> Iterator[PlannedRequest]:
        if self.trace is not None:
            return trace_requests(self.trace, self.load.trace_speed, words, self.seed)
        moments = arrivals(self.count, self.load.request_rate, self.load.burstiness, self.seed)
        if self.prompts.dataset_path is None:
            return random_requests(moments, self.lengths, words, self.seed)
        samples = read_samples(
            self.dataset, self.prompts.dataset_path, self.count, words, self.seed, self.prompts.output_len
        )
        return file_requests(moments, samples, words)

    def settings(self) -> dict[str, Any]:
        """What was measured, as JSON values, without keys and headers."""
        flags = self.prompts
        is_random = self.trace is None and self.dataset is DatasetName.RANDOM
        lengths = {
            "random_input_len": self.lengths.input_len,
            "random_output_len": self.lengths.output_len,
            "random_prefix_len": flags.prefix_len,
            "random_range_ratio": flags.range_ratio,
        }
        return {
            "ktqueue": __version__,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "backend": str(self.form.backend),
            "url": f"{self.address}{self.endpoint}",
            "model_id": self.form.model,
            "tokenizer_id": flags.tokenizer,
            "dataset_name": "trace" if self.trace is not None else str(self.dataset),
            "num_prompts": self.count,
            "request_rate": self.load.request_rate if math.isfinite(self.load.request_rate) else "inf",
            "burstiness": self.load.burstiness,
            "max_concurrency": self.load.max_concurrency,
            "trace_speed": self.load.trace_speed if self.trace is not None else None,
            "seed": self.seed,
            **(lengths if is_random else {}),
            "ignore_eos": self.form.ignore_eos,
            "extra_body": dict(self.form.extra),
        }


async def _only_model(client: HttpClient) -> str:
    status, body = await fetch(client, "GET", "/v1/models")
    if status != 200:
        raise refusal(status, body)
    try:
        served = listed_models(loads(body)["data"])
    except (CodecError, KeyError, TypeError) as error:
        raise InvalidRequest("/v1/models is not a list of models: name one with --model", param="model") from error
    return one_model(served)


def _error(address: Address, failure: RequestFailure) -> KtqueueError:
    """The error for a failure before the measurement."""
    text = f"{address}: {failure}"
    if failure.kind in ("cannot connect", "disconnected", "timeout", "HTTP 502", "HTTP 503"):
        return Unavailable(text)
    return InvalidRequest(text) if failure.kind.startswith("HTTP 4") else KtqueueError(text)


def _note(figures: Figures) -> str:
    failed = f", {figures.failed} failed" if figures.failed else ""
    return f"{figures.output_throughput:,.0f} tok/s{failed}"


def _allow_files() -> None:
    """Allow as many open files, and so connections, as the system does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _tokenizer(model: str) -> CountTokens:
    from ktqueue.loading.tokenizer.tokenizer import load_tokenizer

    encode = load_tokenizer(model).encode_plain
    return lambda text: len(encode(text))


def _headers(server: ServerFlags) -> dict[str, str]:
    headers = {"User-Agent": f"ktqueue/{__version__}", "Accept": "text/event-stream, application/json"}
    if server.api_key:
        headers["Authorization"] = f"Bearer {server.api_key}"
    for text in server.header or ():
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise UsageFault(f"--header: must be KEY=VALUE, got {text!r}")
        headers[name] = value
    return headers


def _extra(server: ServerFlags) -> dict[str, Any]:
    named = {"temperature": server.temperature, "job_class": server.job_class, "priority": server.priority}
    extra = {name: value for name, value in named.items() if value is not None}
    if server.extra_body is not None:
        try:
            fields = loads(server.extra_body)
        except CodecError as error:
            raise UsageFault(f"--extra-body: {error.message}") from error
        if not isinstance(fields, dict):
            raise UsageFault(f"--extra-body: must be a JSON object, got {server.extra_body!r}")
        extra |= fields
    return extra


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _one_of(flag: str, name: str, known: Iterable[str]) -> str:
    names = tuple(known)
    if name not in names:
        raise UsageFault(f"{flag}: must be {', '.join(names[:-1])} or {names[-1]}, got {name!r}")
    return name


def _number(flag: str, word: str, least: float, most: float) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not least < value <= most:
        raise UsageFault(f"{flag}: must be a number above {least:g}, at most {most:g}, got {word!r}")
    return value


def _goodput(word: str) -> tuple[str, float]:
    """Read a limit such as ttft:500, in ms. Returns the metric and the limit in seconds."""
    name, _, limit = word.partition(":")
    return _one_of("--goodput", name, GOODPUT_METRICS), _number(f"--goodput {name}", limit, 0, math.inf) / 1e3
