"""/tokenize, /detokenize and /apply-template of a whole installation, in vLLM's and llama.cpp's forms."""

import asyncio
from typing import Any

import pytest

from ktqueue.loading.tokenizer.tokenizer import load_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEXT = "The king's näive daughters"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
RENDERED = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


async def post(stack: Any, path: str, **body: Any) -> Any:
    answer = await stack.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_a_text_as_with_vllm(stack: Any, prefix: str) -> None:
    tokenizer = load_tokenizer("demo")
    ids = tokenizer.encode(TEXT)
    card = (await stack.http.get("/v1/models")).json()["data"][0]
    body = await post(stack, f"{prefix}/tokenize", model="demo", prompt=TEXT)
    assert body == {"tokens": ids, "count": len(ids), "max_model_len": card["max_model_len"], "token_strs": None}
    body = await post(stack, f"{prefix}/tokenize", prompt=TEXT, return_token_strs=True)
    assert body["token_strs"] == [tokenizer.decode([token_id]) for token_id in ids]
    assert (await post(stack, f"{prefix}/detokenize", tokens=ids))["prompt"] == TEXT


async def test_messages_are_tokenised_as_the_template_renders_them(stack: Any) -> None:
    ids = load_tokenizer("demo").encode(RENDERED)
    body = await post(stack, "/tokenize", messages=MESSAGES, return_token_strs=True)
    assert body["tokens"] == ids and body["token_strs"][0] == "<|im_start|>"
    assert (await post(stack, "/apply-template", messages=MESSAGES)) == {"prompt": RENDERED}
    assert (await post(stack, "/detokenize", tokens=ids)) == {"prompt": RENDERED, "content": RENDERED}


async def test_a_text_as_with_llama_cpp(stack: Any) -> None:
    ids = load_tokenizer("demo").encode("a\U0001f98a")
    assert (await post(stack, "/tokenize", content="a\U0001f98a")) == {"tokens": ids}
    body = await post(stack, "/tokenize", content="a\U0001f98a", with_pieces=True)
    assert [entry["id"] for entry in body["tokens"]] == ids
    pieces = [entry["piece"] for entry in body["tokens"]]
    data = b"".join(piece.encode() if isinstance(piece, str) else bytes(piece) for piece in pieces)
    assert data.decode() == "a\U0001f98a" and any(isinstance(piece, list) for piece in pieces)
    assert (await post(stack, "/tokenize", content="")) == {"tokens": []}
    assert (await post(stack, "/detokenize", tokens=[])) == {"prompt": "", "content": ""}


async def test_as_many_tokens_as_the_context_has_become_the_tokenizers_text(stack: Any) -> None:
    limit = (await stack.http.get("/v1/models")).json()["data"][0]["max_model_len"]
    ids = [300 + n % 50 for n in range(limit)]
    text = (await post(stack, "/detokenize", tokens=ids))["content"]
    assert text == load_tokenizer("demo").decode(ids)
    answer = await stack.http.post("/detokenize", json={"tokens": [*ids, 300]})
    message = f"tokens must be at most {limit} token ids, the model's context, got {limit + 1}"
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["message"]) == (400, "tokens", message)


async def test_many_at_once_while_all_rows_generate(stack: Any) -> None:
    sampling = {"max_tokens": 300, "ignore_eos": True}
    jobs = [await stack.submit(prompt=TEXT, sampling=sampling, job_class="batch") for _ in range(10)]
    bodies = await asyncio.gather(*(post(stack, "/tokenize", prompt=f"{TEXT} {n}") for n in range(20)))
    tokenizer = load_tokenizer("demo")
    assert [body["tokens"] for body in bodies] == [tokenizer.encode(f"{TEXT} {n}") for n in range(20)]
    for job in jobs:
        await stack.http.delete(f"/v1/jobs/{job}")


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "content": "b"}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "a" * 1_000_000}, 400, "prompt"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, 400, "tokens[0]"),
        ("/apply-template", {"messages": []}, 400, "messages"),
        ("/apply-template", {"messages": [{"role": "user", "content": 5}]}, 400, "messages.0.content"),
    ],
)
async def test_an_error_names_the_field(stack: Any, path: str, body: dict[str, Any], status: int, param: str) -> None:
    answer = await stack.http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert (await stack.http.get(path)).status_code == 405
