"""The limits of each field of a request."""

import math
from types import MappingProxyType
from typing import Any

import pytest

from ktqueue.core.errors import InvalidRequest
from ktqueue.core.request import GenerationRequest, JobClass, SamplingParams

GOOD = [
    {"temperature": 0},
    {"temperature": 100},
    {"top_k": 0},
    {"top_p": 1},
    {"top_p": 1e-9},
    {"min_p": 0.0},
    {"min_p": 1.0},
    {"repetition_penalty": 0.01},
    {"presence_penalty": -2},
    {"frequency_penalty": 2},
    {"logit_bias": {0: -100, 5: 100.0}},
    {"logit_bias": MappingProxyType({1: 1.0})},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"stop": ("a",) * 16},
    {"stop": ("x" * 1024,)},
    {"stop_token_ids": (0, 2**31 - 1)},
    {"min_tokens": 3, "max_tokens": 3},
    {"logprobs": 0},
    {"logprobs": 20},
    {"n": 128},
]
BAD = [
    ("temperature", -0.1),
    ("temperature", 100.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", None),
    ("top_k", -1),
    ("top_k", 1.5),
    ("top_k", 2**31),
    ("top_p", 0),
    ("top_p", 1.01),
    ("min_p", -0.01),
    ("min_p", 1.01),
    ("repetition_penalty", 0),
    ("repetition_penalty", 101),
    ("presence_penalty", -2.1),
    ("frequency_penalty", 2.1),
    ("logit_bias", {-1: 0}),
    ("logit_bias", {"1": 0}),
    ("logit_bias", {1: 101}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", dict.fromkeys(range(1025), 0)),
    ("logit_bias", [1]),
    ("seed", 2**63),
    ("seed", 1.0),
    ("seed", True),
    ("stop", ("a",) * 17),
    ("stop", ("",)),
    ("stop", ("x" * 1025,)),
    ("stop", ["a"]),
    ("stop", "a"),
    ("stop", (1,)),
    ("stop_token_ids", (-1,)),
    ("stop_token_ids", [1]),
    ("max_tokens", -1),
    ("max_tokens", 1.0),
    ("min_tokens", -1),
    ("ignore_eos", 1),
    ("logprobs", 21),
    ("logprobs", -1),
    ("logprobs", True),
    ("n", 0),
    ("n", 129),
]


@pytest.mark.parametrize("settings", GOOD, ids=repr)
def test_these_parameters_are_allowed(settings: dict[str, Any]) -> None:
    SamplingParams(**settings)


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda value: repr(value)[:30])
def test_a_refusal_has_name_limit_and_value(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value})
    error = caught.value
    assert error.param == name
    assert error.limit
    assert error.value
    assert name in error.message
    assert len(error.message) < 300  # a huge value is cut
    assert error.status == 400


def test_min_tokens_is_bounded_by_max_tokens() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens"):
        SamplingParams(min_tokens=4, max_tokens=3)


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"model": ""}, "model"),
        ({"model": "m" * 257}, "model"),
        ({"model": 1}, "model"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": 1}, "prompt"),
        ({"prompt_token_ids": (1,)}, "prompt_token_ids"),  # two prompts
        ({"prompt": None, "prompt_token_ids": ()}, "prompt_token_ids"),
        ({"prompt": None, "prompt_token_ids": [1]}, "prompt_token_ids"),
        ({"prompt": None, "prompt_token_ids": (-1,)}, "prompt_token_ids"),
        ({"prompt": None, "messages": ()}, "messages"),
        ({"prompt": None, "messages": ({"content": "x"},)}, "messages[0]"),
        ({"prompt": None, "messages": ({"role": "user"}, "x")}, "messages[1]"),
        ({"expires_in": 0}, "expires_in"),
        ({"expires_in": 367 * 86400}, "expires_in"),
        ({"expires_in": math.nan}, "expires_in"),
        ({"job_class": "urgent"}, "job_class"),
        ({"priority": 101}, "priority"),
        ({"priority": -101}, "priority"),
        ({"priority": 1.0}, "priority"),
        ({"priority": True}, "priority"),
        ({"tools": [{}]}, "tools"),
        ({"tools": ("x",)}, "tools"),
        ({"chat_template_kwargs": 1}, "chat_template_kwargs"),
        ({"user": 1}, "user"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": ["a"]}, "metadata"),
        ({"sampling": {}}, "sampling"),
    ],
    ids=repr,
)
def test_wrong_requests_are_refused(settings: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        GenerationRequest(**{"model": "m", "prompt": "x", **settings})
    assert caught.value.param == param


def test_a_priority_out_of_bounds_is_refused_with_its_limit() -> None:
    with pytest.raises(InvalidRequest) as caught:
        GenerationRequest(model="m", prompt="x", priority=-101)
    assert (caught.value.limit, caught.value.value) == ("an integer from -100 to 100", "-101")
    assert "priority" in str(caught.value)


def test_a_class_may_be_given_by_its_name() -> None:
    by_name: dict[str, Any] = {"job_class": "batch"}
    assert GenerationRequest(model="m", prompt="x", **by_name).job_class is JobClass.BATCH


def test_a_request_cannot_be_changed() -> None:
    field = "model"
    with pytest.raises(AttributeError):
        setattr(GenerationRequest(model="m", prompt="x"), field, "n")
