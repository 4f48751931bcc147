"""Reader of Python calls, as Llama 4, LFM2 and OLMo write them."""

import ast
import warnings
from collections.abc import Callable
from typing import Any

from ktqueue.answers.call_readers import NAME, CallReader, Emit, HeldText, to_json

_JSON_NAMES = {"true": True, "false": False, "null": None}
_LINE_ENDS = {"\r": "\n"}
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\0": "\\x00"}


class PythonReader(CallReader):
    """A list of Python calls, such as `[weather(city="Paris"), time()]`. It is read once the list is complete.

    `end`: calls stand in lines of their own, up to this marker. A call that cannot be read is given back as text, and
    the others are calls all the same.
    """

    def __init__(self, begin: Callable[[], Emit], end: str = "") -> None:
        self._begin = begin
        self._held = HeldText((end,)) if end else None
        self._text: list[str] = []
        self._depth = 0
        self._quote = ""
        self._escaped = False
        self._ended = False

    def push(self, text: str) -> int | None:
        if self._held is not None:
            if not self._held.push(text):
                return None
            self._ended = True
            return len(text) - len(self._held.after)
        for place, character in enumerate(text):
            self._text.append(character)
            if self._quote:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == self._quote:
                    self._quote = ""
            elif character in "\"'":
                self._quote = character
            elif character in "[({":
                self._depth += 1
            elif character in "])}":
                self._depth -= 1
                if self._depth <= 0:
                    self._ended = True
                    return place + 1
        return None

    def finish(self) -> str:
        """Emit the calls of a complete list. Anything else is text."""
        text = "".join(self._text) if self._held is None else self._held.take()
        parts = _python_calls(text) if self._ended else []
        calls = [part for part in parts if isinstance(part, tuple)]
        if not calls:
            return text if self._held is None else text + self._held.mark
        for call in calls:
            self._begin()(*call, "")
        return "\n".join(part for part in parts if isinstance(part, str))


def _python_calls(text: str) -> list[tuple[str, str] | str]:
    """Name and arguments of each call, and the text of what is none. Empty if it is no Python at all."""
    try:
        source = _cleaned(text.strip())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a wrong escape such as "\\d" is the model's, not ours
            body = ast.parse(source).body
        expressions = [line.value for line in body if isinstance(line, ast.Expr)]
        if len(expressions) != len(body):
            return []
        elements = [
            element
            for expression in expressions
            for element in (expression.elts if isinstance(expression, ast.List) else [expression])
        ]
        lines = [line.encode() for line in source.split("\n")]  # of which Python counts no others
        return [_call(element) or _text_of(lines, element) for element in elements]
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return []


def _call(element: ast.expr) -> tuple[str, str] | None:
    """Name and arguments of a call with literal arguments, else None."""
    try:
        if not isinstance(element, ast.Call) or element.args:
            return None
        name = ast.unparse(element.func)
        if not NAME.fullmatch(name) or any(keyword.arg is None for keyword in element.keywords):
            return None
        return name, to_json({str(keyword.arg): _value(keyword.value) for keyword in element.keywords})
    except (ValueError, TypeError):
        return None


def _text_of(lines: list[bytes], node: ast.expr) -> str:
    """The source of a node. ast.get_source_segment splits the whole source for each node, which is quadratic."""
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    if first == last:
        return lines[first][node.col_offset : node.end_col_offset].decode()
    whole = [lines[first][node.col_offset :], *lines[first + 1 : last], lines[last][: node.end_col_offset]]
    return b"\n".join(whole).decode()


def _value(node: ast.expr) -> Any:
    """A literal, also with the names of JSON. JSON has no sets and tuples: they are lists. Raises ValueError."""
    match node:
        case ast.Constant(value=str() | int() | float() | None):
            return node.value
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
            return [_value(element) for element in elements]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {str(_value(key)): _value(value) for key, value in pairs if key is not None}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
    raise ValueError(f"{ast.unparse(node)} is no literal")


def _cleaned(text: str) -> str:
    """The text with escapes for line breaks inside strings, and without zeros before whole numbers.

    Its lines end with a line feed alone.
    """
    out: list[str] = []
    quote, escaped = "", False
    for place, character in enumerate(text):
        if quote:
            out.append(_LINE_ENDS.get(character, character) if escaped else _ESCAPES.get(character, character))
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == quote:
                quote = ""
        elif character == "0" and text[place + 1 : place + 2].isdigit() and not _continues(out):
            continue
        else:
            out.append(_LINE_ENDS.get(character, character))
            quote = character if character in "\"'" else ""
    return "".join(out)


def _continues(out: list[str]) -> bool:
    """Whether a digit would continue a name or a number."""
    return bool(out) and (out[-1].isalnum() or out[-1] in "_.")
