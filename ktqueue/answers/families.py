"""How families of models mark reasoning and tool calls in their text. One table, read by the parser and the grammars.

Sources of the markers: the chat templates that the models' publishers distribute.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

HARMONY = "harmony"  # the format of gpt-oss
HARMONY_START = "<|start|>assistant"  # begins each of its messages; the first one is begun by the prompt


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning stands between `start` and `end`, before the answer.

    `wrappers`: marks around the answer itself, which are dropped. `begun`: an answer begins inside reasoning, also if
    neither it nor its prompt has `start`. `specials`: as in ToolFormat.
    """

    start: str
    end: str
    wrappers: tuple[str, ...] = ()
    begun: bool = False
    specials: bool = False


@dataclass(frozen=True, slots=True)
class Tags:
    """Tags of a family's own around the parts of a call: NAME `name_end`, then KEY and VALUE of each parameter.

    Each of these has its marks: `key_start` KEY `key_end` VALUE `value_end`. The call ends with `end`.
    `cdata`: a text may stand in XML's `<![CDATA[...]]>`.
    """

    name_end: str
    key_start: str
    key_end: str
    value_end: str
    end: str
    cdata: bool = False


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family writes tool calls.

    A call begins at one of `starts`. `sections` open a list of calls and `ends` close a call or the list: these are
    dropped. How the call itself is written is recognised from its first characters: see `call_readers`. With
    `bare_json` or `bare_python`, an answer that begins with a JSON object or a list of them, or with a list of Python
    calls, is a call without a marker. `specials`: whether markers are special tokens, which the text has only if they
    are asked for. `heads`: the part of a marker that belongs to the call itself. `inner`: what the call begins with,
    behind its marker and a header that is dropped. `quote`: the mark around texts, in the families of Gemma.
    `tags`: those of calls that are written in no way that several families share.
    """

    starts: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    bare_json: bool = False
    bare_python: bool = False
    specials: bool = False
    heads: Mapping[str, str] = field(default_factory=dict)
    inner: str = ""
    quote: str = ""
    tags: Tags | None = None


REASONING: Mapping[str, ReasoningFormat] = {
    "think": ReasoningFormat("<think>", "</think>"),
    "deepseek_r1": ReasoningFormat("<think>", "</think>", begun=True),
    "hunyuan": ReasoningFormat("<think>", "</think>", wrappers=("<answer>", "</answer>")),
    "ernie": ReasoningFormat("<think>", "</think>", wrappers=("<response>", "</response>")),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
    "apertus": ReasoningFormat("<|inner_prefix|>", "<|inner_suffix|>", specials=True),
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>", specials=True),
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", specials=True),
    "command": ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>", specials=True),
    "seed": ReasoningFormat("<seed:think>", "</seed:think>", specials=True),
    "solar": ReasoningFormat("<|think:start|>", "<|think:end|>", specials=True),
    "harmony": ReasoningFormat("<|channel|>analysis<|message|>", "<|end|>", specials=True),
}

_TOOL_CALL = ToolFormat(starts=("<tool_call>", "<function="), ends=("</tool_call>",))
_DEEPSEEK = ToolFormat(
    starts=("<｜tool▁call▁begin｜>",),
    sections=("<｜tool▁calls▁begin｜>",),
    ends=("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    specials=True,
)
_MISTRAL = ToolFormat(starts=("[TOOL_CALLS]",), ends=("]", "[/TOOL_CALLS]"), specials=True)
_JSON_HEADS = ('{"name"', '{ "name"', '{"type": "function"', '{"type":"function"')
TOOLS: Mapping[str, ToolFormat] = {
    # Hermes, Qwen2.5, Qwen3 (JSON), Qwen3-Coder (<function=...>) and GLM-4.5 (<arg_key>) share the outer marker, and
    # are read alike. Grammars write them in different ways.
    "tool_call": _TOOL_CALL,
    "qwen3_coder": _TOOL_CALL,
    "glm45": _TOOL_CALL,
    "deepseek": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": ToolFormat(
        starts=('<｜DSML｜invoke name="',),
        sections=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),  # the latter since V4
        ends=("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
    ),
    "kimi_k2": ToolFormat(
        starts=("<|tool_call_begin|>",),
        sections=("<|tool_calls_section_begin|>",),
        ends=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        specials=True,
    ),
    "mistral": _MISTRAL,
    "mistral_args": _MISTRAL,
    "minimax": ToolFormat(
        starts=('<invoke name="',), sections=("<minimax:tool_call>",), ends=("</minimax:tool_call>",)
    ),
    "llama3": ToolFormat(
        starts=("<|python_tag|>", "<function=", *_JSON_HEADS),
        ends=(";",),
        bare_json=True,
        specials=True,
        heads={head: head for head in _JSON_HEADS},
    ),
    "xlam": ToolFormat(
        starts=("<tool_call>", "[TOOL_CALLS]"), ends=("]", "</tool_call>"), bare_json=True, specials=True
    ),
    "llama4": ToolFormat(
        starts=("<|python_start|>",), ends=("<|python_end|>",), bare_python=True, bare_json=True, specials=True
    ),
    "granite": ToolFormat(starts=("<|tool_call|>",), ends=("]", "<|/tool_call|>"), specials=True),
    "granite_fc": ToolFormat(starts=("<function_call>",), ends=("</function_call>",), specials=True),
    "phi4mini": ToolFormat(
        starts=("functools[", "<|tool_call|>"), ends=("]", "<|/tool_call|>"), specials=True, heads={"functools[": "["}
    ),
    "internlm": ToolFormat(
        starts=("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"), ends=("<|action_end|>",), specials=True
    ),
    "longcat": ToolFormat(starts=("<longcat_tool_call>",), ends=("</longcat_tool_call>",), specials=True),
    "gigachat": ToolFormat(
        starts=("<|function_call|>", "function call<|role_sep|>"), sections=("<|message_sep|>",), specials=True
    ),
    "hy_v3": ToolFormat(
        starts=("<tool_call>",), sections=("<tool_calls>",), ends=("</tool_call>", "</tool_calls>"), specials=True
    ),
    "step3": ToolFormat(
        starts=("<｜tool_call_begin｜>",),
        sections=("<｜tool_calls_begin｜>", "<｜tool_sep｜>"),
        ends=("<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
        specials=True,
        inner='<steptml:invoke name="',
    ),
    "apertus": ToolFormat(starts=("<|tools_prefix|>",), ends=("]", "<|tools_suffix|>"), specials=True),
    "olmo3": ToolFormat(starts=("<function_calls>",), ends=("</function_calls>",), specials=True),
    "functiongemma": ToolFormat(
        starts=("<start_function_call>call:",), ends=("<end_function_call>",), specials=True, quote="<escape>"
    ),
    "gemma4": ToolFormat(starts=("<|tool_call>call:",), ends=("<tool_call|>",), specials=True, quote='<|"|>'),
    "command": ToolFormat(
        starts=("<|START_ACTION|>",),
        sections=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        ends=("]", "<|END_ACTION|>"),
        specials=True,
    ),
    "lfm2": ToolFormat(starts=("<|tool_call_start|>",), ends=("]", "<|tool_call_end|>"), specials=True),
    "nemotron": ToolFormat(starts=("<TOOLCALL>",), ends=("]", "</TOOLCALL>")),
    "seed": ToolFormat(
        starts=("<function=",), sections=("<seed:tool_call>",), ends=("</seed:tool_call>",), specials=True
    ),
    "solar": ToolFormat(
        starts=("<|tool_call:start|>",),
        specials=True,
        tags=Tags("\n", "<|tool_arg:start|>", "<|tool_arg:value|>", "<|tool_arg:end|>", "<|tool_call:end|>"),
    ),
    "minicpm5": ToolFormat(
        starts=('<function name="',), tags=Tags('">', '<param name="', '">', "</param>", "</function>", cdata=True)
    ),
    "gigachat35": ToolFormat(
        starts=('<｜GCML｜invoke name="',),
        sections=("<｜GCML｜tool_calls>",),
        ends=("</｜GCML｜tool_calls>",),
        specials=True,
    ),
    "jamba": ToolFormat(starts=("<tool_calls>",), ends=("]", "</tool_calls>")),
    "harmony": ToolFormat(specials=True),
}

# What of a chat template shows its family, the most telling first. Templates of other families mention these too, so
# the order matters: a Hermes template that also knows <think> is found under both tables.
_TOOL_SIGNS: tuple[tuple[str, str], ...] = (
    ("<|channel|>", "harmony"),
    ("DSML｜", "deepseek_v32"),
    ("GCML｜", "gigachat35"),
    ("<|tool_call:start|>", "solar"),
    ('<function name="', "minicpm5"),
    ("<|START_ACTION|>", "command"),
    ("<|tool_call>", "gemma4"),
    ("<start_function_call>", "functiongemma"),
    ("<|tools_prefix|>", "apertus"),
    ("<steptml:invoke", "step3"),
    ("<|action_start|>", "internlm"),
    ("<longcat_tool_call>", "longcat"),
    ("<|function_call|>", "gigachat"),
    ("function call<|role_sep|>", "gigachat"),
    ("<tool_sep>", "hy_v3"),
    ("<function_calls>", "olmo3"),
    ("<function_call>", "granite_fc"),
    ("<|tool|>", "phi4mini"),
    ("<|tool_call_start|>", "lfm2"),
    ("<TOOLCALL>", "nemotron"),
    ("<seed:tool_call>", "seed"),
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
# Formats that differ in how a call is written: (format, sign in the template, name of the variant).
_VARIANTS = (
    ("tool_call", "<function=", "qwen3_coder"),
    ("tool_call", "<arg_key>", "glm45"),
    ("deepseek", "```json", "deepseek_v3"),
    ("mistral", "[ARGS]", "mistral_args"),
)
_REASONING_SIGNS: tuple[tuple[str, str], ...] = (
    ("<|channel|>", "harmony"),
    ("◁think▷", "kimi"),
    ("[THINK]", "mistral"),
    ("<|START_THINKING|>", "command"),
    ("<seed:think>", "seed"),
    ("<|think:start|>", "solar"),
    ("<|channel>", "gemma4"),
    ("<|inner_prefix|>", "apertus"),
    ("Here is my thought process", "granite"),
    ("</answer>", "hunyuan"),
    ("<response>", "ernie"),
    ("<think>", "think"),
    ("</think>", "think"),
)


# How vLLM and SGLang call the formats, where the name differs from ours.
_TOOL_ALIASES: Mapping[str, str] = {
    "hermes": "tool_call", "qwen": "tool_call", "qwen25": "tool_call", "qwen3": "tool_call", "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder", "glm": "glm45", "glm47": "glm45", "deepseek_v31": "deepseek", "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek", "deepseekv32": "deepseek_v32", "llama3_json": "llama3", "llama4_json": "llama4",
    "llama4_pythonic": "llama4", "pythonic": "llama4", "minimax_m2": "minimax", "openai": "harmony",
    "gpt_oss": "harmony", "seed_oss": "seed", "phi4_mini_json": "phi4mini", "cohere_command3": "command",
    "cohere_command4": "command", "deepseekv4": "deepseek_v32", "deepseek_v4": "deepseek_v32", "ernie45": "tool_call",
    "gigachat3": "gigachat", "granite4": "tool_call", "granite_20b_fc": "granite_fc", "hunyuan_a13b": "jamba",
    "hunyuan": "jamba", "mimo": "tool_call", "mimov2_flash": "qwen3_coder", "qwen3_5": "qwen3_coder",
    "solar_open2": "solar", "poolside_v1": "glm45", "trinity": "tool_call",
}  # fmt: skip
_REASONING_ALIASES: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "deepseek_v3", "deepseek_v31", "deepseek_v4", "qwen3", "glm45", "glm47", "kimi_k2", "kimi_k25", "mimo",
            "minimax_m2", "olmo3", "nemotron_v3", "exaone4", "holo2",
        ), "think",
    ),
    **dict.fromkeys(("step3", "qwen3_thinking", "step3p5"), "deepseek_r1"),
    "ernie45": "ernie", "hunyuan_a13b": "hunyuan", "hy_v3": "think", "cohere_command3": "command",
    "seed_oss": "seed", "magistral": "mistral", "openai_gptoss": "harmony", "gpt_oss": "harmony",
    "solar_open2": "solar", "poolside_v1": "think",
}  # fmt: skip


def tool_parser_named(name: str, template: str) -> str:
    """The tool format for a setting: a name, `none`, or `auto`, which asks the chat template. Raises KeyError."""
    return _named(name, template, tool_format_of, _TOOL_ALIASES, TOOLS)


def reasoning_parser_named(name: str, template: str) -> str:
    """The same for a format of reasoning."""
    return _named(name, template, reasoning_format_of, _REASONING_ALIASES, REASONING)


def _named(
    name: str, template: str, of_template: Callable[[str], str], aliases: Mapping[str, str], table: Mapping[str, object]
) -> str:
    if name == "auto":
        return of_template(template)
    if name == "none":
        return ""
    plain = name.lower().replace("-", "_")
    known = aliases.get(plain, plain)
    if known not in table:
        raise KeyError(name)
    return known


def has_special_markers(tool_parser: str, reasoning_parser: str) -> bool:
    """Whether special tokens must be part of the text, so that these formats can be read."""
    tools = TOOLS.get(tool_parser)
    reasoning = REASONING.get(reasoning_parser)
    return (tools is not None and tools.specials) or (reasoning is not None and reasoning.specials)


def tool_format_of(template: str) -> str:
    """The name of the tool format that a chat template uses; empty if it has none that we know."""
    found = next((name for sign, name in _TOOL_SIGNS if sign in template), "")
    for name, sign, variant in _VARIANTS:
        if found == name and sign in template:
            found = variant
    # Llama 4's template of the publisher has no marker of its own: it asks for [func_name(params=value)].
    return found or ("llama4" if "<|header_start|>" in template and "tools" in template else "")


def reasoning_format_of(template: str) -> str:
    """The name of the reasoning format that a chat template uses; empty if it has none that we know."""
    return next((name for sign, name in _REASONING_SIGNS if sign in template), "")
