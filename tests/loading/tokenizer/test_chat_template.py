"""Chat templates render as in transformers; malformed messages are refused by field.

The templates are our own in the styles of known families, and real ones if they are available.
"""

from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from ktqueue.core.errors import CheckpointError, InvalidRequest
from ktqueue.loading.tokenizer.chat_template import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a <place> & time",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Köln, say"}},
                "required": ["city"],
            },
        },
    }
]
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
TALKS: dict[str, list[dict[str, Any]]] = {
    "plain": [{"role": "user", "content": "Tell me a story about a fox & a crow."}],
    "system": [
        {"role": "system", "content": "You tell tales."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Once upon a time …"},
        {"role": "user", "content": "Go on"},
    ],
    "tools": [
        {"role": "user", "content": "How is the weather in Köln?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "rain", "name": "weather", "tool_call_id": "call_1"},
    ],
}
TEMPLATES = sorted((Path(__file__).parent / "templates").glob("*.jinja"))
NAMES = (
    "GLM-4.6",
    "Kimi-K2-Instruct",
    "Qwen-Qwen3-0.6B",
    "Qwen3-Coder",
    "deepseek-ai-DeepSeek-V3.1",
    "meta-llama-Llama-3.1-8B-Instruct",
    "openai-gpt-oss-120b",
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("talk", list(TALKS))
@pytest.mark.parametrize("with_tools", [False, True])
def test_real_templates_equal_transformers(name: str, talk: str, with_tools: bool, shared_data: Path) -> None:
    source = (shared_data / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    tools = TOOLS if with_tools else []
    template = ChatTemplate(source, SPECIAL, name)
    if tools and name.startswith("deepseek"):  # its template ignores tools
        with pytest.raises(InvalidRequest) as caught:
            template.render(TALKS[talk], tools)
        assert caught.value.param == "tools"
        return
    got = template.render(TALKS[talk], tools)
    if (name, talk) != ("Kimi-K2-Instruct", "tools"):  # transformers' sandbox refuses this template
        options: dict[str, Any] = {"chat_template": source, "add_generation_prompt": True, **SPECIAL}
        rendered = render_jinja_template([TALKS[talk]], tools=tools or None, **options)
        assert got == rendered[0][0]
    assert TALKS[talk][-1]["content"] in got
    assert ("weather of a <place> & time" in got) == with_tools


@pytest.mark.parametrize("path", TEMPLATES, ids=[path.stem for path in TEMPLATES])
@pytest.mark.parametrize("talk", list(TALKS))
@pytest.mark.parametrize("with_tools", [False, True])
def test_templates_of_all_styles_equal_transformers(path: Path, talk: str, with_tools: bool) -> None:
    source = path.read_text(encoding="utf-8")
    tools = TOOLS if with_tools else []
    if tools and path.stem == "bars":  # it ignores tools
        with pytest.raises(InvalidRequest, match="does not support tools"):
            ChatTemplate(source, SPECIAL, path.stem).render(TALKS[talk], tools)
        return
    got = ChatTemplate(source, SPECIAL, path.stem).render(TALKS[talk], tools)
    options: dict[str, Any] = {"chat_template": source, "add_generation_prompt": True, **SPECIAL}
    assert got == render_jinja_template([TALKS[talk]], tools=tools or None, **options)[0][0]
    for message in TALKS[talk]:
        assert message["content"] in got
    assert ("weather of a <place> & time" in got) == with_tools


def _render(
    messages: list[dict[str, Any]], source: str = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
) -> str:
    return ChatTemplate(source, SPECIAL, "test").render(messages)


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert _render([{"role": "user", "content": parts}]) == "[ab]"


def test_tool_arguments_become_objects() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    source = "{{ messages[0].tool_calls[0].function.arguments.x }}"
    assert _render([{"role": "assistant", "content": None, "tool_calls": [call]}], source) == "1"


def test_generation_blocks_and_json_and_time() -> None:
    source = "{% generation %}{{ {'a': '<ü>'} | tojson }}{% endgeneration %} {{ strftime_now('%Y') | length }}"
    assert _render([{"role": "user", "content": "x"}], source) == '{"a": "<ü>"} 4'


def test_arguments_of_the_request_reach_the_template() -> None:
    template = ChatTemplate("{{ enable_thinking }} {{ add_generation_prompt }}", SPECIAL, "test")
    messages = [{"role": "user", "content": "x"}]
    assert template.render(messages, (), {"enable_thinking": False}) == "False True"
    assert template.render(messages, (), {"add_generation_prompt": False}).strip() == "False"
    with pytest.raises(InvalidRequest, match="must not set 'messages'") as caught:
        template.render(messages, (), {"messages": []})
    assert caught.value.param == "chat_template_kwargs.messages"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}, "messages[0].content[1]"),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [7]}, "messages[0].content[0]"),
        ({"role": "user", "content": 7}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": 3}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0].function"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_malformed_messages_are_refused_by_field(message: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        _render([message])
    assert caught.value.param == param and caught.value.limit and param in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[9].content }}",
        "{{ 1 + 'a' }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for i in range(1000000000) %}{% endfor %}",
    ],
)
def test_an_error_of_a_template_refuses_the_request(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template refused the messages") as caught:
        _render([{"role": "user", "content": "x"}], source)
    assert caught.value.param == "messages"


def test_a_template_works_on_copies() -> None:
    messages = [{"role": "user", "content": "x"}]
    assert _render(messages, "{% set _ = messages.append(1) %}{{ messages | length }}") == "2"
    assert messages == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{% break %}",
        "{{ f(a=1, a=2) }}",
        "{{ " + "9" * 10_000 + " }}",
        "{% for a in b %}" * 25 + "{% endfor %}" * 25,
        "{{ " + "(" * 5_000,
    ],
)
def test_a_template_that_does_not_parse_is_named(source: str) -> None:
    """Python's compiler and not jinja2 finds some of the faults."""
    with pytest.raises(CheckpointError, match=r"some.gguf: the chat template does not parse"):
        ChatTemplate(source, SPECIAL, "some.gguf")


CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
]


@pytest.mark.parametrize("arguments", ["f.arguments | tojson", "'' + f.arguments"])
@pytest.mark.parametrize("condition", ["m.tool_calls", "m.content is none", "m.tool_calls and m.content is not none"])
def test_tool_calls_are_spelled_as_the_template_expects(arguments: str, condition: str) -> None:
    source = (
        "{% for m in messages %}{% if CONDITION %}{% set f = m.tool_calls[0].function %}({{ f.name }} {{ ARGUMENTS }})"
        "{% else %}[{{ m.content }}]{% endif %}{% endfor %}"
    )
    source = source.replace("CONDITION", condition).replace("ARGUMENTS", arguments)
    assert ChatTemplate(source, SPECIAL, "test").render(CALLED) == '[Hi](weather {"city": "Köln"})[rain]'


def test_ids_of_calls_have_the_length_that_a_template_asks_for() -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
        "{{ raise_exception('nine characters') }}{% endif %}{{ c.id }}{% endfor %}"
        "{% if m.role == 'tool' %}={{ m.tool_call_id }}{{ m.content }}{% endif %}{% endfor %}"
    )
    called, result = ChatTemplate(source, SPECIAL, "test").render(CALLED).split("=")
    assert len(called) == 9 and result == f"{called}rain"


def test_reasoning_is_thinking_where_the_template_calls_it_so() -> None:
    messages = [{"role": "assistant", "content": "x", "reasoning_content": "Hm"}]
    assert _render(messages, "{{ messages[0].thinking }}") == "Hm"


def test_an_unknown_role_reaches_the_prompt_or_is_refused() -> None:
    messages = [{"role": "critic", "content": "Bad"}]
    assert _render(messages) == "[Bad]"
    with pytest.raises(InvalidRequest, match="does not know the role") as caught:
        _render([{"role": "user", "content": "x"}, *messages], "{{ messages[0].content }}")
    assert caught.value.param == "messages[1].content"


@pytest.mark.parametrize("content", ["Once upon", "Once upon ", " Once\n", "a"])
@pytest.mark.parametrize("shown", ["m.content", "m.content | trim"])
def test_the_last_message_is_continued_as_by_transformers(content: str, shown: str) -> None:
    source = f"{{% for m in messages %}}<{{{{ m.role }}}}>{{{{ {shown} }}}}<|end|>{{% endfor %}}"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
    got = ChatTemplate(source, SPECIAL, "test").render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    wanted = render_jinja_template(
        [messages], chat_template=source, continue_final_message=True, add_generation_prompt=False
    )
    assert got == wanted[0][0]


def test_a_message_that_cannot_be_continued_is_refused() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content[:2] }}{% endfor %}", SPECIAL, "test")
    for last in ({"role": "assistant", "content": "long"}, {"role": "assistant", "content": ""}, CALLED[1]):
        with pytest.raises(InvalidRequest) as caught:
            template.render([last], add_generation_prompt=False, continue_final_message=True)
        assert caught.value.param == "continue_final_message"


def test_reasoning_is_continued_if_there_is_no_content() -> None:
    source = "{% for m in messages %}<think>{{ m.reasoning_content }}</think>{{ m.content }}{% endfor %}"
    messages = [{"role": "assistant", "content": "", "reasoning_content": "Well"}]
    template = ChatTemplate(source, SPECIAL, "test")
    assert template.render(messages, add_generation_prompt=False, continue_final_message=True) == "<think>Well"
