"""Calls as chat templates write them into prompts are read again by the parser of the template's family."""

import json
from pathlib import Path
from typing import Any

import pytest

from ktqueue.answers.families import reasoning_format_of, tool_format_of
from ktqueue.answers.parser import make_parser
from ktqueue.answers.parts import AnswerReasoning, AnswerToolCall, joined
from ktqueue.core.errors import InvalidRequest
from ktqueue.loading.tokenizer.chat_template import ChatTemplate

OWN = Path(__file__).parents[1] / "loading" / "tokenizer" / "templates"
WITHOUT_TOOLS = {"deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "deepseek-ai-DeepSeek-V3.1"}
OWN_WITHOUT_TOOLS = {"bars", "channels"}
ONE_CALL = {"meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.3-70B-Instruct", "openai-gpt-oss-120b"}
PROPERTIES = {"city": "string", "days": "integer", "zip": "string", "tags": "array"}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": 'S\u00e3o Paulo, "x" <b>', "days": 3, "zip": "01310", "tags": ["a", "b\\n"]}),
    ("now", {}),
]
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {
        "type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}}}
    for name, properties in (("get_weather", PROPERTIES), ("now", {}))
]  # fmt: skip


def written(template: ChatTemplate, calls: list[tuple[str, dict[str, Any]]], reasoning: str) -> str:
    """What the template writes for a message with these calls."""
    message = {
        "role": "assistant",
        "content": "",
        "reasoning_content": reasoning,
        "tool_calls": [
            {"id": f"call{place:05}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for place, (name, arguments) in enumerate(calls)
        ],
    }
    user = {"role": "user", "content": "Hi"}
    prompt = template.render([user], TOOLS)
    text = template.render([user, message], TOOLS, add_generation_prompt=False)
    begin = 0
    while begin < min(len(prompt), len(text)) and prompt[begin] == text[begin]:
        begin += 1
    marker = text.rfind("<", 0, begin)  # both may go on with the beginning of a marker
    return text[marker if marker > text.rfind(">", 0, begin) else begin :]


@pytest.mark.parametrize("publisher", ["ours", "others"])
def test_calls_in_a_prompt_are_those_of_the_message(publisher: str, request: pytest.FixtureRequest) -> None:
    folder = OWN if publisher == "ours" else request.getfixturevalue("shared_data") / "chat_templates"
    seen = 0
    for path in sorted(folder.glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        tools, reasoning = tool_format_of(source), reasoning_format_of(source)
        if not tools or path.stem in WITHOUT_TOOLS | OWN_WITHOUT_TOOLS:
            continue
        template = ChatTemplate(source, {"bos_token": "<BOS>", "eos_token": "<EOS>"}, path.stem)
        for calls in (CALLS[:1], CALLS[1:], CALLS):
            if len(calls) > 1 and path.stem in ONE_CALL:
                continue
            parser = make_parser(tools, reasoning, {"get_weather": PROPERTIES}, "")
            assert parser is not None
            text = written(template, calls, "Hm.")
            parts = joined([part for character in text for part in parser.push(character)] + [*parser.finish()])
            found = [(part.name, json.loads(part.arguments)) for part in parts if isinstance(part, AnswerToolCall)]
            assert found == calls, (path.stem, text)
            assert all(part.text == "Hm." for part in parts if isinstance(part, AnswerReasoning)), (path.stem, text)
            seen += 1
    assert seen


def test_templates_that_leave_tools_out_are_refused(shared_data: Path) -> None:
    for name in WITHOUT_TOOLS:
        source = (shared_data / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
        template = ChatTemplate(source, {"bos_token": "", "eos_token": ""}, name)
        with pytest.raises(InvalidRequest, match="leaves tools out of the prompt"):
            template.render([{"role": "user", "content": "Hi"}], TOOLS)
