"""Prompts for filling a gap: the tokens are found by metadata or by name, and stand in the right order."""

from dataclasses import replace

import pytest

from ktqueue.core.errors import InvalidRequest
from ktqueue.core.request import GenerationRequest
from ktqueue.loading.gguf.header import read_header
from ktqueue.loading.gguf.vocabulary import TokenKind, from_metadata, to_metadata
from ktqueue.loading.model_path import resolve
from ktqueue.loading.tokenizer.fill_in_middle import GapTokens, gap_tokens
from ktqueue.loading.tokenizer.tokenizer import from_data, load_tokenizer

REQUEST = GenerationRequest(model="m", prompt="def add(a, b):\n", suffix="\n    return c\n")


@pytest.mark.parametrize(
    "names",
    [
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
    ],
)
def test_families_are_found_by_the_names_of_their_tokens(names: tuple[str, str, str]) -> None:
    assert gap_tokens(["a", *names, "b"], {}) == GapTokens(1, 2, 3)
    assert gap_tokens(["a", *names[:2], "b"], {}) is None


def test_metadata_comes_before_names() -> None:
    names = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
    assert gap_tokens(names, {"fim_pre": 2, "fim_suf": 0, "fim_mid": 1}) == GapTokens(2, 0, 1)
    assert gap_tokens(names, {"fim_pre": 2}) == GapTokens(0, 1, 2)


def test_a_prompt_may_have_a_gap() -> None:
    data = from_metadata(read_header(resolve("demo")).metadata, "demo")
    names = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    first = len(data.tokens)
    with_gap = replace(
        data,
        tokens=[*data.tokens, *names],
        kinds=[*data.kinds, *[TokenKind.CONTROL] * 3],
        ids={**data.ids, "fim_pre": first, "fim_suf": first + 1, "fim_mid": first + 2},
    )
    tokenizer = from_data(from_metadata(to_metadata(with_gap), "copy"), "copy")
    prompt = tokenizer.encode_request(REQUEST)
    assert prompt.token_ids == [
        first, *tokenizer.encode("def add(a, b):\n"), first + 1, *tokenizer.encode("\n    return c\n"), first + 2
    ]  # fmt: skip
    assert prompt.text == "<|fim_prefix|>def add(a, b):\n<|fim_suffix|>\n    return c\n<|fim_middle|>"


def test_a_model_that_cannot_fill_gaps_says_so() -> None:
    with pytest.raises(InvalidRequest, match="suffix needs a model with tokens for filling in the middle") as caught:
        load_tokenizer("demo").encode_request(REQUEST)
    assert caught.value.param == "suffix"
    plain = replace(REQUEST, suffix=None)
    empty = load_tokenizer("demo").encode_request(replace(REQUEST, suffix=""))
    assert empty.token_ids == load_tokenizer("demo").encode_request(plain).token_ids


def test_spellings_of_bad_words() -> None:
    tokenizer = load_tokenizer("demo")
    request = replace(REQUEST, suffix=None, sampling=replace(REQUEST.sampling, bad_words=(" king", "?!")))
    spellings = {tuple(tokenizer.encode(text)) for text in ("king", " king", "?!", " ?!")}
    assert set(tokenizer.encode_request(request).bad_words) == spellings
