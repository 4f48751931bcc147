"""How families of models mark reasoning and tool calls in their text. One table, read by the parser and the grammars.

Sources of the markers: the chat templates that the models' publishers distribute.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning stands between `start` and `end`, before the answer."""

    start: str
    end: str


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family writes tool calls.

    A call begins at one of `starts`. `sections` open a list of calls and `ends` close a call or the list: these are
    dropped. How the call itself is written is recognised from its first characters: see `call_readers`. With
    `bare_json` or `bare_python`, an answer that begins with a JSON object, or with a list of Python calls, is a call
    without a marker. `specials`: whether markers are special tokens, which the text has only if they are asked for.
    """

    starts: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    bare_json: bool = False
    bare_python: bool = False
    specials: bool = False


REASONING: Mapping[str, ReasoningFormat] = {
    "think": ReasoningFormat("<think>", "</think>"),
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed": ReasoningFormat("<seed:think>", "</seed:think>"),
    "harmony": ReasoningFormat("<|channel|>analysis<|message|>", "<|end|>"),
}

TOOLS: Mapping[str, ToolFormat] = {
    # Hermes, Qwen2.5, Qwen3 (JSON), Qwen3-Coder (<function=...>) and GLM-4.5 (<arg_key>) share the outer marker.
    "tool_call": ToolFormat(starts=("<tool_call>", "<function="), ends=("</tool_call>",)),
    "deepseek": ToolFormat(
        starts=("<｜tool▁call▁begin｜>",),
        sections=("<｜tool▁calls▁begin｜>",),
        ends=("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        specials=True,
    ),
    "deepseek_v32": ToolFormat(
        starts=('<｜DSML｜invoke name="',), sections=("<｜DSML｜function_calls>",), ends=("</｜DSML｜function_calls>",)
    ),
    "kimi_k2": ToolFormat(
        starts=("<|tool_call_begin|>",),
        sections=("<|tool_calls_section_begin|>",),
        ends=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        specials=True,
    ),
    "mistral": ToolFormat(starts=("[TOOL_CALLS]",), ends=("]", "[/TOOL_CALLS]"), specials=True),
    "minimax": ToolFormat(
        starts=('<invoke name="',), sections=("<minimax:tool_call>",), ends=("</minimax:tool_call>",)
    ),
    "llama3": ToolFormat(starts=("<|python_tag|>",), ends=(";",), bare_json=True, specials=True),
    "llama4": ToolFormat(
        starts=("<|python_start|>",), ends=("<|python_end|>",), bare_python=True, bare_json=True, specials=True
    ),
    "granite": ToolFormat(starts=("<|tool_call|>",), ends=("]",), specials=True),
    "jamba": ToolFormat(starts=("<tool_calls>",), ends=("]", "</tool_calls>")),
    "harmony": ToolFormat(specials=True),
}

# What of a chat template shows its family, the most telling first. Templates of other families mention these too, so
# the order matters: a Hermes template that also knows <think> is found under both tables.
_TOOL_SIGNS: tuple[tuple[str, str], ...] = (
    ("<|channel|>", "harmony"),
    ("<｜DSML｜", "deepseek_v32"),
    ("<｜tool▁call", "deepseek"),
    ("<|tool_call_begin|>", "kimi_k2"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<minimax:tool_call>", "minimax"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_start|>", "llama4"),
    ("<|python_tag|>", "llama3"),
    ("<|tool_call|>", "granite"),
    ("<tool_calls>", "jamba"),
    ("<tool_call>", "tool_call"),
    ("<function=", "tool_call"),
)
_REASONING_SIGNS: tuple[tuple[str, str], ...] = (
    ("<|channel|>", "harmony"),
    ("◁think▷", "kimi"),
    ("[THINK]", "mistral"),
    ("<seed:think>", "seed"),
    ("<think>", "think"),
    ("</think>", "think"),
)


def has_special_markers(tool_parser: str, reasoning_parser: str) -> bool:
    """Whether special tokens must be part of the text, so that these formats can be read."""
    tools = TOOLS.get(tool_parser)
    return (tools is not None and tools.specials) or reasoning_parser in ("mistral", "harmony")


def tool_format_of(template: str) -> str:
    """The name of the tool format that a chat template uses; empty if it has none that we know."""
    found = next((name for sign, name in _TOOL_SIGNS if sign in template), "")
    # Llama 4's template of the publisher has no marker of its own: it asks for [func_name(params=value)].
    return found or ("llama4" if "<|header_start|>" in template and "tools" in template else "")


def reasoning_format_of(template: str) -> str:
    """The name of the reasoning format that a chat template uses; empty if it has none that we know."""
    return next((name for sign, name in _REASONING_SIGNS if sign in template), "")
