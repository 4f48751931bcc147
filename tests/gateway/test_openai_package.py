"""The `openai` package against a gateway and a worker with the built-in model, each in its own process."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import openai
import pytest
from processes import free_ports
from pydantic import BaseModel, Field
from served_gateway import Conforms

from ktqueue.core.tenants import hash_of

ROOT = Path(__file__).resolve().parents[2]
MESSAGES: Any = [{"role": "user", "content": "Once upon a time there was a"}]
KEY = "secret"


def spawn(stack: ExitStack, arguments: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=stack.enter_context(log.open("wb")),
        stderr=subprocess.STDOUT,
    )

    def end() -> None:
        process.terminate()
        try:
            process.wait(20)
        finally:
            process.kill()
            process.wait()

    stack.callback(end)
    return process


@pytest.fixture(scope="module")
def stack(redis_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The URL and the process of a gateway. A worker is running."""
    pytest.importorskip("torch")
    logs = tmp_path_factory.mktemp("logs")
    [port] = free_ports(1)
    environment = {
        "KTQUEUE_BROKER_URL": redis_server,
        "KTQUEUE_BROKER_PREFIX": "package",
        "KTQUEUE_BROKER_MAX_QUEUED_BATCH": "1",
        "KTQUEUE_ENGINE_MAX_MODEL_LEN": "256",
        "KTQUEUE_GATEWAY_PORT": str(port),
        "KTQUEUE_GATEWAY_API_KEYS": hash_of(KEY),
        "KTQUEUE_GATEWAY_DRAIN_SECONDS": "1",
        "OMP_NUM_THREADS": "1",
    }
    with ExitStack() as resources:
        worker = spawn(resources, ["-m", "ktqueue.workers.generation.worker_process"], environment, logs / "worker.log")
        gateway = spawn(resources, ["-m", "ktqueue.gateway"], environment, logs / "gateway.log")
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            time.sleep(0.1)
            for process, name in ((worker, "worker"), (gateway, "gateway")):
                assert process.poll() is None, (logs / f"{name}.log").read_text()
            try:
                if httpx.get(f"{url}/readyz").status_code == 200:
                    break
            except httpx.TransportError:
                continue
        yield url, gateway


@pytest.fixture
def client(stack: tuple[str, Any]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack[0]}/v1", api_key=KEY, max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    return next(iter(client.models.list())).id


def test_models(client: Any, model: Any, conforms: Conforms) -> None:
    assert client.models.retrieve(model).owned_by == "ktqueue"
    conforms(client.models.list().to_dict(), "ListModelsResponse")


def test_a_chat_has_the_same_text_streamed_or_not(client: Any, model: Any, conforms: Conforms) -> None:
    ask: Any = {"model": model, "messages": MESSAGES, "max_completion_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**ask)
    conforms(whole.to_dict(), "CreateChatCompletionResponse")
    text = whole.choices[0].message.content
    assert text
    assert whole.usage.completion_tokens == 24
    assert whole.choices[0].finish_reason == "length"
    assert whole._request_id

    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks:
        conforms(chunk.to_dict(), "CreateChatCompletionStreamResponse")
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == text
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == ["length"]
    assert chunks[-1].usage.completion_tokens == 24
    # The second time, all pages of the prompt but the last come from the cache.
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens <= chunks[-1].usage.prompt_tokens


class Animal(BaseModel):
    """What the package makes a strict JSON schema of."""

    kind: Literal["fox", "crow"]
    age: Annotated[int, Field(ge=0, le=99)]
    friends: Annotated[list[Literal["hen", "mouse"]], Field(max_length=2)]


def test_an_answer_is_parsed(client: Any, model: Any) -> None:
    ask: Any = {"model": model, "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 200}
    answer = client.chat.completions.parse(**ask, response_format=Animal)
    assert isinstance(answer.choices[0].message.parsed, Animal) and answer.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(**ask, response_format=Animal) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == answer.choices[0].message.parsed


def test_the_streaming_helper(client: Any, model: Any) -> None:
    with client.chat.completions.stream(model=model, messages=MESSAGES, max_completion_tokens=8, n=2) as stream:
        for _ in stream:
            pass
        final = stream.current_completion_snapshot  # the package refuses the final one if it was cut by length
    assert [choice.finish_reason is not None for choice in final.choices] == [True, True]
    assert all(choice.message.content for choice in final.choices)


def test_choices_seed_and_stop(client: Any, model: Any) -> None:
    ask: Any = {"model": model, "messages": MESSAGES, "max_completion_tokens": 16, "n": 3, "seed": 11}
    first, second = (client.chat.completions.create(**ask) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(set(texts)) > 1
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    word = texts[0].split()[2]
    stopped = client.chat.completions.create(**{**ask, "stop": [word]})
    assert word not in stopped.choices[0].message.content
    assert texts[0].startswith(stopped.choices[0].message.content)
    assert stopped.choices[0].finish_reason == "stop"


def test_logprobs(client: Any, model: Any, conforms: Conforms) -> None:
    ask: Any = {"model": model, "messages": MESSAGES, "max_completion_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**ask, logprobs=True, top_logprobs=3)
    conforms(whole.to_dict(), "CreateChatCompletionResponse")
    content = whole.choices[0].logprobs.content
    assert len(content) == 8
    assert "".join(position.token for position in content) == whole.choices[0].message.content
    for position in content:
        assert position.logprob <= 0
        assert len(position.top_logprobs) == 3
        assert position.top_logprobs[0].token == position.token  # greedy
    chunks = list(client.chat.completions.create(**ask, logprobs=True, top_logprobs=3, stream=True))
    streamed = [
        position.logprob
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for position in choice.logprobs.content
    ]
    assert streamed == pytest.approx([position.logprob for position in content], abs=1e-4)


def test_completions(client: Any, model: Any, conforms: Conforms) -> None:
    ask: Any = {"model": model, "prompt": ["Once upon", "The king"], "max_tokens": 8, "temperature": 0, "logprobs": 2}
    whole = client.completions.create(**ask, n=1)
    conforms(whole.to_dict(), "CreateCompletionResponse")
    texts = [choice.text for choice in whole.choices]
    assert len(texts) == 2
    assert "".join(whole.choices[0].logprobs.tokens) == texts[0]
    assert whole.choices[0].logprobs.text_offset[0] == 0
    streamed = ["", ""]
    for chunk in client.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts
    by_id = client.completions.create(model=model, prompt=[1, 2, 3], max_tokens=2)
    assert by_id.usage.prompt_tokens == 3


def error_fields(error: openai.APIError) -> dict[str, Any]:
    """The error object of a response."""
    assert isinstance(error.body, dict)
    return error.body


def test_error_classes(client: Any, model: Any, stack: Any) -> None:
    def create(**change: Any) -> Any:
        return client.chat.completions.create(**{"model": model, "messages": MESSAGES, **change})

    with pytest.raises(openai.BadRequestError) as bad:
        create(temperature=9)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    assert error_fields(bad.value)["limit"] == 2
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as bad:
            create(messages=[{"role": "user", "content": "tale " * 600}], stream=stream)
        assert bad.value.code == "context_length_exceeded"
        assert error_fields(bad.value)["n_ctx"] == 256
        assert error_fields(bad.value)["n_prompt_tokens"] > 256
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=model, prompt=[10**7])
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.NotFoundError):
        create(model="nothing")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nothing")
    headers = {"Idempotency-Key": "once"}
    create(max_completion_tokens=1, seed=1, extra_headers=headers)
    with pytest.raises(openai.UnprocessableEntityError):
        create(max_completion_tokens=1, seed=2, extra_headers=headers)
    with pytest.raises(openai.InternalServerError) as late:
        create(max_completion_tokens=200, n=32, extra_body={"expires_in": 0.05, "ignore_eos": True})
    assert late.value.status_code == 504
    with pytest.raises(openai.APIError, match="deadline"):
        late_body = {"expires_in": 0.3, "ignore_eos": True}
        for _ in create(max_completion_tokens=240, n=32, stream=True, extra_body=late_body):
            pass
    assert create(max_completion_tokens=2).choices[0].message.content


def test_a_full_queue_is_a_rate_limit_error(client: Any, model: Any, stack: Any) -> None:
    headers = {"x-api-key": KEY}
    body = {"model": model, "prompt": "Once", "job_class": "batch"}
    body["sampling"] = {"n": 16, "max_tokens": 250, "ignore_eos": True}
    ids, full = [], None
    try:
        for _ in range(80):
            response = httpx.post(f"{stack[0]}/v1/jobs", json=body, headers=headers)
            if response.status_code != 429:
                ids.append(response.json()["id"])
                continue
            try:  # a job may have left the queue meanwhile
                client.chat.completions.create(model=model, messages=MESSAGES, service_tier="flex", stream=True).close()
            except openai.RateLimitError as error:
                full = error
                break
        assert full is not None and int(full.response.headers["retry-after"]) >= 1
    finally:
        for job_id in ids:
            httpx.delete(f"{stack[0]}/v1/jobs/{job_id}", headers=headers)


def test_fields_of_vllm_are_honoured(client: Any, model: Any) -> None:
    whole = client.chat.completions.create(
        model=model,
        messages=MESSAGES,
        max_tokens=6,
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
        tool_choice="none",
        user="me",
        extra_body={"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "ignore_eos": True, "min_tokens": 6},
    )
    assert whole.usage.completion_tokens == 6


def test_serve_without_redis_says_what_is_missing(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "KTQUEUE_BROKER_URL": f"unix://{tmp_path}/none.sock"}
    environment["KTQUEUE_BROKER_CONNECT_TIMEOUT"] = "0.2"
    ended = subprocess.run(
        [sys.executable, "-m", "ktqueue.gateway"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode != 0
    assert "Redis is away" in ended.stderr


def test_the_gateway_needs_no_torch() -> None:
    code = (
        "import sys, ktqueue.gateway.serve; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True) == "[]\n"


def test_sigterm_ends_the_gateway_in_order(stack: Any) -> None:
    """This must be the last test, since it stops the gateway."""
    _, gateway = stack
    gateway.send_signal(signal.SIGTERM)
    assert gateway.wait(15) == 0
