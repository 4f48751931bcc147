"""POST /v1/completions of a whole installation: prompts in answers, log probabilities, and choices among choices."""

import json
import os
import signal
from typing import Any

import httpx
import pytest

from ktqueue.loading.tokenizer.tokenizer import load_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="session")

STORY = "Once upon a time there was a king who had näive daughters"
BODY: dict[str, Any] = {"model": "demo", "prompt": STORY, "temperature": 0, "max_tokens": 6, "ignore_eos": True}


async def complete(stack: Any, **changes: Any) -> Any:
    answer = await stack.http.post("/v1/completions", json={**BODY, **changes})
    assert answer.status_code == 200, answer.text
    return answer.json()


def check_lists(choice: Any) -> None:
    """Four lists of equal length; each token stands at its offset in the text."""
    logprobs = choice["logprobs"]
    assert len({len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}) == 1
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token
    assert "".join(logprobs["tokens"]) == choice["text"]


async def test_an_echoed_prompt_comes_before_the_answer_also_in_logprobs(stack: Any) -> None:
    plain = (await complete(stack))["choices"][0]["text"]
    assert (await complete(stack, echo=True))["choices"][0]["text"] == STORY + plain
    ids = load_tokenizer("demo").encode(STORY)
    body = await complete(stack, prompt=[ids, STORY], echo=True, logprobs=2, n=2)
    assert [choice["text"] for choice in body["choices"]] == [STORY + plain] * 4
    for choice in body["choices"]:
        check_lists(choice)
        assert len(choice["logprobs"]["tokens"]) == len(ids) + 6
        assert choice["logprobs"]["token_logprobs"][0] is None and choice["logprobs"]["top_logprobs"][0] is None
        assert all(value <= 0 for value in choice["logprobs"]["token_logprobs"][1:])


async def test_only_the_prompt(stack: Any) -> None:
    body = await complete(stack, max_tokens=0, echo=True, logprobs=1)
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == (STORY, "length")
    check_lists(choice)
    assert body["usage"]["completion_tokens"] == 0
    (choice,) = (await complete(stack, max_tokens=0))["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")


async def test_the_log_probability_of_a_token_is_the_same_in_the_prompt_and_in_the_answer(stack: Any) -> None:
    answered = (await complete(stack, logprobs=1, return_token_ids=True))["choices"][0]
    whole = answered["prompt_token_ids"] + answered["token_ids"]
    scored = (await complete(stack, prompt=whole, max_tokens=0, echo=True, logprobs=1))["choices"][0]
    expected = answered["logprobs"]["token_logprobs"]
    assert scored["logprobs"]["token_logprobs"][-6:] == pytest.approx(expected, abs=1e-2)
    assert scored["logprobs"]["text_offset"][-6:] == [len(STORY) + n for n in answered["logprobs"]["text_offset"]]


async def test_streams_have_the_same_lists(stack: Any) -> None:
    whole = (await complete(stack, echo=True, logprobs=2, return_token_ids=True))["choices"][0]
    lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    text, token_ids, prompt_ids = "", [], []
    body = {**BODY, "echo": True, "logprobs": 2, "return_token_ids": True, "stream": True}
    async with stack.http.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                text += choice["text"]
                token_ids += choice["token_ids"]
                prompt_ids += choice.get("prompt_token_ids", [])
                for name, values in (choice["logprobs"] or {}).items():
                    lists[name] += values
    assert (text, lists) == (whole["text"], whole["logprobs"])
    assert (prompt_ids, token_ids) == (whole["prompt_token_ids"], whole["token_ids"])


async def test_prompt_logprobs_in_the_form_of_vllm(stack: Any) -> None:
    ids = load_tokenizer("demo").encode(STORY)
    (choice,) = (await complete(stack, prompt_logprobs=2))["choices"]
    first, *entries = choice["prompt_logprobs"]
    assert first is None and len(entries) == len(ids) - 1
    for token_id, entry in zip(ids[1:], entries, strict=True):
        assert {token["rank"] for token in entry.values()} - {None} == {1, 2}
        assert set(entry[str(token_id)]) == {"logprob", "rank", "decoded_token"}
    chat = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    answer = (await stack.http.post("/v1/chat/completions", json={**chat, "prompt_logprobs": 0})).json()
    texts = [token["decoded_token"] for entry in answer["prompt_logprobs"][1:] for token in entry.values()]
    assert "".join(texts) == "user\nHi<|im_end|>\n<|im_start|>assistant\n"
    refused = await stack.http.post("/v1/completions", json={**BODY, "prompt_logprobs": 1, "stream": True})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_logprobs"


async def test_token_ids_are_those_of_the_prompt_and_the_text(stack: Any) -> None:
    tokenizer = load_tokenizer("demo")
    (choice,) = (await complete(stack, return_token_ids=True))["choices"]
    assert choice["prompt_token_ids"] == tokenizer.encode(STORY)
    assert tokenizer.decode(choice["token_ids"]) == choice["text"]
    body = await complete(stack, echo=True, logprobs=1, return_token_ids=True, return_tokens_as_token_ids=True)
    (choice,) = body["choices"]
    names = [f"token_id:{token_id}" for token_id in choice["prompt_token_ids"] + choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == names
    chat = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "return_token_ids": True}
    answer = (await stack.http.post("/v1/chat/completions", json=chat)).json()
    assert tokenizer.decode(answer["prompt_token_ids"]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert len(answer["choices"][0]["token_ids"]) == 3


async def test_the_best_choices_are_returned(stack: Any) -> None:
    sampled: dict[str, Any] = {"prompt": [STORY, "The wolf"], "temperature": 1.0, "seed": 5, "max_tokens": 8}
    every = await complete(stack, **sampled, n=6, logprobs=0)
    best = await complete(stack, **sampled, n=2, best_of=6)
    assert best["usage"] == every["usage"]
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in best["choices"])
    for job in range(2):
        choices = every["choices"][6 * job : 6 * job + 6]
        choices.sort(key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
        assert [choice["text"] for choice in best["choices"][2 * job : 2 * job + 2]] == [
            choice["text"] for choice in choices[:2]
        ]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"suffix": "the end"}, "suffix"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"prompt": [5, 10**6]}, "prompt[1]"),
        ({"prompt": [[5], [6, 10**6]]}, "prompt[1][1]"),
        ({"prompt": [[5], [6, 10**6]], "stream": True}, "prompt[1][1]"),
        ({"prompt": ["a", "a " * 9000]}, "prompt[1]"),
    ],
)
async def test_a_refusal_names_the_field(stack: Any, changes: dict[str, Any], param: str) -> None:
    answer = await stack.http.post("/v1/completions", json={**BODY, **changes})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert "prompt_token_ids" not in error["message"]


async def test_limits_of_the_answer(stack: Any) -> None:
    tokenizer = load_tokenizer("demo")
    text = (await complete(stack, max_tokens=30))["choices"][0]["text"]
    word = text.split()[3]
    assert word not in (await complete(stack, max_tokens=30, bad_words=[word]))["choices"][0]["text"].split()
    stopped = await complete(stack, max_tokens=30, stop=[word], include_stop_str_in_output=True)
    assert stopped["choices"][0]["text"].endswith(word)
    (choice,) = (await complete(stack, allowed_token_ids=[300, 301], return_token_ids=True))["choices"]
    assert set(choice["token_ids"]) <= {300, 301}
    (choice,) = (await complete(stack, truncate_prompt_tokens=3, return_token_ids=True))["choices"]
    assert choice["prompt_token_ids"] == tokenizer.encode(STORY)[-3:]
    long = await complete(stack, prompt=STORY * 20_000, truncate_prompt_tokens=-1, return_token_ids=True)
    card = (await stack.http.get("/v1/models")).json()["data"][0]
    assert long["usage"]["total_tokens"] == card["max_model_len"]


async def test_a_prompt_in_an_answer_survives_the_death_of_its_worker(stack: Any) -> None:
    sampling = {"temperature": 0.0, "max_tokens": 200, "ignore_eos": True, "prompt_logprobs": 1}
    body = {"prompt": STORY * 30, "sampling": sampling, "return_prompt": True}
    expected = await stack.read(await stack.submit(**body))

    def kill(count: int) -> None:
        if count == 3:
            os.kill(stack.up.workers[0].pid, signal.SIGKILL)

    deaths = stack.up.workers[0].deaths
    found = await stack.read(await stack.submit(**body), on_event=kill)
    assert stack.up.workers[0].deaths == deaths + 1
    assert found.state == "done" and found.choices() == expected.choices()
    for name in ("token_ids", "text", "logprobs"):
        joined: list[Any] = []
        for reader in (expected, found):
            parts = [event["prompt"][name] for event in reader.events if name in event.get("prompt", {})]
            joined.append("".join(parts) if name == "text" else [entry for part in parts for entry in part])
        if name == "logprobs":
            joined = [[entry and entry["token_id"] for entry in entries] for entries in joined]
        assert joined[0] == joined[1] and joined[0]


@pytest.mark.long
async def test_the_backlog_of_one_address_does_not_delay_another(start_stack: Any) -> None:
    async with start_stack(engine={"max_num_seqs": 4}) as stack:
        await stack.until_ready()
        long = [await stack.submit(prompt=STORY, sampling={"max_tokens": 400, "ignore_eos": True}) for _ in range(40)]
        other = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
        async with httpx.AsyncClient(base_url=stack.up.url, timeout=60, transport=other) as neighbour:
            answer = await neighbour.post("/v1/completions", json=BODY)
        states = [(await stack.job(job_id))["state"] for job_id in long]
        assert answer.json()["usage"]["completion_tokens"] == 6
        assert states.count("queued") >= 20  # it came after all of them
