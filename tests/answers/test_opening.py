"""What of an answer its prompt already contains."""

import pytest

from ktqueue.answers.opening import MAX_OPENING, begun_reasoning, opening_of


@pytest.mark.parametrize(
    ("prompt", "opening"),
    [
        ("<|user|>What is <think>?<|assistant|>", ""),
        ("<|assistant|><think>", "<think>"),
        ("<|assistant|><think>\n", "<think>\n"),
        ("<|assistant|><think>\n\n</think>\n\n", "<think>\n\n</think>\n\n"),
        ("<|assistant|></think>", "</think>"),
        ("<think>before</think>yes<|assistant|></think>", "</think>"),
    ],
)
def test_a_new_message(prompt: str, opening: str) -> None:
    assert opening_of(prompt, "think") == opening
    assert opening_of(prompt, "") == ""


def test_a_continued_message() -> None:
    assert opening_of("", "think", "<think>Well") == "<think>Well"
    assert opening_of("", "think", "", "Well") == "<think>Well"
    long = "<think>" + "x" * 9999
    assert opening_of("", "think", long) == "<think>" + "x" * MAX_OPENING
    assert opening_of("", "think", "x" * 9999) == "x" * MAX_OPENING


def test_reasoning_is_begun_once() -> None:
    assert begun_reasoning("<|assistant|>", "think") == "<|assistant|><think>\n"
    assert begun_reasoning("<|assistant|><think>\n", "think") == "<|assistant|><think>\n"
    assert begun_reasoning("<|assistant|>", "seed") == "<|assistant|><seed:think>\n"
    assert begun_reasoning("<|assistant|>", "") == "<|assistant|><think>\n"
