"""Templates in separate processes: the same text, and limits that refuse one request and affect no other."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ktqueue.core.errors import InvalidRequest
from ktqueue.core.request import GenerationRequest
from ktqueue.loading.tokenizer.chat_template import ChatTemplate
from ktqueue.loading.tokenizer.template_process import CPU_SECONDS, WALL_SECONDS, TemplateProcesses

# A template that does what the argument `kind` of the request says.
SOURCE = """
{%- if kind == "loops" %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}
{%- elif kind == "memory" %}{{ ("x" * 11 * 10 ** 8) | length }}
{%- elif kind == "doubling" %}{% set n = namespace(s="x" * 1000) %}
    {%- for _ in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}
{%- elif kind == "one call" %}{{ (7 ** (9 ** 9)) % 10 }}
{%- elif kind == "recursion" %}{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}
{%- elif kind == "surrogate" %}{{ "\\ud800" }}
{%- else %}{{ bos }}{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}{% endif %}"""
TALK: tuple[dict[str, Any], ...] = ({"role": "user", "content": "Köln \n & <b>"},)
Ask = Callable[..., str]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Renders in a process, and returns the prompt."""
    with started(WALL_SECONDS) as render:
        yield render


@contextmanager
def started(wall_seconds: float) -> Iterator[Ask]:
    processes = TemplateProcesses(ChatTemplate(SOURCE, {"bos": "<s>"}, "test"), wall_seconds)
    processes.start()

    def render(kind: str = "", messages: tuple[dict[str, Any], ...] = TALK, **fields: Any) -> str:
        kwargs = {"chat_template_kwargs": {"kind": kind}, **fields}
        return processes.render(GenerationRequest(model="m", messages=messages, **kwargs))

    yield render
    processes.close()


def test_the_text_is_that_of_the_template(ask: Ask) -> None:
    assert ask() == "<s>[user: Köln \n & <b>]"
    long = ({"role": "user", "content": "ü" * 1_000_000},)
    assert ask("", long) == f"<s>[user: {'ü' * 1_000_000}]"


@pytest.mark.parametrize("kind", ["doubling", "one call", "recursion", "surrogate"])
def test_a_template_that_exceeds_a_limit_is_refused(kind: str) -> None:
    with started(wall_seconds=1.0) as ask:
        with pytest.raises(InvalidRequest) as caught:
            ask(kind)
        assert caught.value.param == "messages"
        assert len(caught.value.message) < 600
        assert ask() == "<s>[user: Köln \n & <b>]"  # the next request is served


def test_a_template_is_stopped_when_its_cpu_time_is_over(ask: Ask) -> None:
    """The process's own timer stops the template, and the process can render the next one."""
    with pytest.raises(InvalidRequest, match="seconds of CPU time") as caught:
        ask("loops")
    assert caught.value.limit == CPU_SECONDS


def test_the_memory_of_a_template_is_limited(ask: Ask) -> None:
    with pytest.raises(InvalidRequest, match="took more than 1024 MiB"):
        ask("memory")


def test_refusals_keep_their_field(ask: Ask) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask("", ({"role": "user", "content": 7},))
    assert (caught.value.param, caught.value.value) == ("messages[0].content", "int")
    for arguments in ("[" * 100_000, '{"a":' * 1_000, "[" * 600 + "]" * 600):
        call = {"function": {"name": "f", "arguments": arguments}}
        with pytest.raises(InvalidRequest):
            ask("", ({"role": "assistant", "content": "", "tool_calls": [call]},))


def test_constants_are_not_computed_when_the_template_is_loaded() -> None:
    ChatTemplate(
        "{% if never %}{{ 9 ** (9 ** 9) }}{% set n = 9 ** (9 ** 9) %}{{ 'x' * 10 ** 12 }}{% endif %}", {}, "test"
    )


def test_tools_that_the_template_leaves_out_are_refused(ask: Ask) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    with pytest.raises(InvalidRequest) as caught:
        ask(tools=({"type": "function", "function": {"name": "f"}},))
    assert caught.value.param == "tools"
    with pytest.raises(InvalidRequest) as caught:
        ask("", (*TALK, {"role": "assistant", "content": "", "tool_calls": [call]}))
    assert caught.value.param == "messages[1].tool_calls"
    assert ask("", (*TALK, {"role": "tool", "content": "2"})).endswith("[tool: 2]")
    users = ChatTemplate("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", {}, "test")
    with pytest.raises(InvalidRequest) as caught:
        users.render((*TALK, {"role": "tool", "content": "2"}))
    assert caught.value.param == "messages[1].content"
