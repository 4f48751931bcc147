"""How each family writes tool calls, for the grammars that let a model write nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallStyle:
    """How a family writes calls: `opening`, then calls with `separator` between them, then `closing`.

    A call is `start` NAME `middle` ARGUMENTS `end`. Arguments are JSON, or with `parameter` a list of parameters, each
    `parameter` KEY `parameter_middle` VALUE `parameter_end`. The texts of strings then have no quotation marks, and
    `string_mark` and `json_mark` follow the key. `many`: whether several calls may follow each other.
    """

    start: str
    middle: str
    end: str
    opening: str = ""
    closing: str = ""
    separator: str = ""
    parameter: str = ""
    parameter_middle: str = ""
    parameter_end: str = ""
    string_mark: str = ""
    json_mark: str = ""
    many: bool = True


STYLES: Mapping[str, CallStyle] = {
    "tool_call": CallStyle(
        '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", separator="\n"
    ),
    "qwen3_coder": CallStyle(
        "<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", separator="\n",
        parameter="<parameter=", parameter_middle=">\n", parameter_end="\n</parameter>\n",
    ),
    "glm45": CallStyle(
        "<tool_call>", "\n", "</tool_call>", separator="\n",
        parameter="<arg_key>", parameter_middle="</arg_key>\n<arg_value>", parameter_end="</arg_value>\n",
    ),
    "deepseek": CallStyle(
        "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
        opening="<｜tool▁calls▁begin｜>", closing="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v3": CallStyle(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>",
        opening="<｜tool▁calls▁begin｜>", closing="<｜tool▁calls▁end｜>", separator="\n",
    ),
    "deepseek_v32": CallStyle(
        '<｜DSML｜invoke name="', '">\n', "</｜DSML｜invoke>\n",
        opening="<｜DSML｜function_calls>\n", closing="</｜DSML｜function_calls>",
        parameter='<｜DSML｜parameter name="', parameter_middle=">", parameter_end="</｜DSML｜parameter>\n",
        string_mark='" string="true"', json_mark='" string="false"',
    ),
    "kimi_k2": CallStyle(
        "<|tool_call_begin|>functions.", ":\0<|tool_call_argument_begin|>", "<|tool_call_end|>",
        opening="<|tool_calls_section_begin|>", closing="<|tool_calls_section_end|>",
    ),
    "mistral": CallStyle(
        '{"name": "', '", "arguments": ', "}", opening="[TOOL_CALLS][", closing="]", separator=", "
    ),
    "mistral_args": CallStyle("[TOOL_CALLS]", "[ARGS]", ""),
    "minimax": CallStyle(
        '<invoke name="', '">\n', "</invoke>\n",
        opening="<minimax:tool_call>\n", closing="</minimax:tool_call>",
        parameter='<parameter name="', parameter_middle='">', parameter_end="</parameter>\n",
    ),
    "llama3": CallStyle('{"name": "', '", "parameters": ', "}", many=False),
    "llama4": CallStyle('{"name": "', '", "parameters": ', "}", many=False),
    "granite": CallStyle(
        '{"name": "', '", "arguments": ', "}", opening="<|tool_call|>[", closing="]", separator=", "
    ),
    "command": CallStyle(
        '{"tool_call_id": "\0", "tool_name": "', '", "parameters": ', "}",
        opening="<|START_ACTION|>[", closing="]<|END_ACTION|>", separator=", ",
    ),
    "lfm2": CallStyle(
        '{"name": "', '", "arguments": ', "}", opening="<|tool_call_start|>[", closing="]<|tool_call_end|>",
        separator=", ",
    ),
    "nemotron": CallStyle(
        '{"name": "', '", "arguments": ', "}", opening="<TOOLCALL>[", closing="]</TOOLCALL>", separator=", "
    ),
    "seed": CallStyle(
        "<function=", ">\n", "</function>\n", opening="<seed:tool_call>\n", closing="</seed:tool_call>",
        parameter="<parameter=", parameter_middle=">", parameter_end="</parameter>\n",
    ),
    "internlm": CallStyle(
        '<|action_start|><|plugin|>{"name": "', '", "parameters": ', "}<|action_end|>", many=False
    ),
    "longcat": CallStyle(
        '<longcat_tool_call>\n{"name": "', '", "arguments": ', "}\n</longcat_tool_call>", separator="\n"
    ),
    "gigachat": CallStyle('<|function_call|>{"name": "', '", "arguments": ', "}", many=False),
    "granite_fc": CallStyle('<function_call> {"name": "', '", "arguments": ', "}", separator="\n"),
    "phi4mini": CallStyle(
        '{"name": "', '", "arguments": ', "}", opening="functools[", closing="]", separator=", "
    ),
    "apertus": CallStyle('{"', '": ', "}", opening="<|tools_prefix|>[", closing="]<|tools_suffix|>", separator=", "),
    "hy_v3": CallStyle(
        "<tool_call>", "<tool_sep>\n", "</tool_call>\n", opening="<tool_calls>\n", closing="</tool_calls>",
        parameter="<arg_key>", parameter_middle="</arg_key>\n<arg_value>", parameter_end="</arg_value>\n",
    ),
    "step3": CallStyle(
        '<｜tool_call_begin｜><steptml:invoke name="', '">', "</steptml:invoke><｜tool_call_end｜>",
        opening="<｜tool_calls_begin｜>", closing="<｜tool_calls_end｜>", separator="<｜tool_sep｜>",
        parameter='<steptml:parameter name="', parameter_middle='">', parameter_end="</steptml:parameter>",
    ),
    "solar": CallStyle(
        "<|tool_call:start|>", "\n", "<|tool_call:end|>", separator="\n",
        parameter="<|tool_arg:start|>", parameter_middle="<|tool_arg:value|>", parameter_end="<|tool_arg:end|>\n",
    ),
    "minicpm5": CallStyle(
        '<function name="', '">', "</function>", separator="\n",
        parameter='<param name="', parameter_middle='">', parameter_end="</param>",
    ),
    "gigachat35": CallStyle(
        '<｜GCML｜invoke name="', '">\n', "</｜GCML｜invoke>", separator="\n",
        opening="<｜GCML｜tool_calls>\n", closing="\n</｜GCML｜tool_calls>",
        parameter='<｜GCML｜parameter name="', parameter_middle=">", parameter_end="</｜GCML｜parameter>\n",
        string_mark='" string="true"', json_mark='" string="false"',
    ),
    "xlam": CallStyle('[{"name": "', '", "arguments": ', "}]", many=False),
    "jamba": CallStyle(
        '{"name": "', '", "arguments": ', "}", opening="<tool_calls>[", closing="]</tool_calls>", separator=", "
    ),
    "harmony": CallStyle(
        "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "", many=False
    ),
}  # fmt: skip
