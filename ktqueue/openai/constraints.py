"""Fields that say which form an answer must have, and their translation to one grammar.

The names are those of OpenAI (`response_format`), vLLM (`structured_outputs`, `guided_*`), llama.cpp (`grammar`,
`json_schema`) and SGLang (`regex`, `ebnf`, `json_schema`). They all mean the same few things, so at most one of them
may be given. docs/guides/structured-output.md has examples.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ktqueue.answers import grammar
from ktqueue.answers.grammar_errors import GrammarRefused
from ktqueue.answers.grammar_process import check_syntax
from ktqueue.core.errors import InvalidRequest
from ktqueue.core.short_repr import short_repr
from ktqueue.openai.json_schema import WHITESPACE, lark_of_schema
from ktqueue.openai.validation import StrictBody, must_be

MAX_CHOICES_LISTED = 1000
MAX_PATTERN = 1 << 15  # characters
MAX_GRAMMAR_TEXT = 1 << 18  # characters
MAX_NAME = 64


def _none_if_empty(value: Any) -> Any:
    """Clients that list all fields send empty ones for what they do not want."""
    return None if value is False or value in ("", [], {}) else value


def _schema_or_text(value: Any) -> Any:
    if value is None or isinstance(value, dict | str):
        return value
    raise must_be("a JSON schema, or its text", value)


_Empty = BeforeValidator(_none_if_empty)
OptionalText = Annotated[str | None, _Empty]
SchemaOrText = Annotated[dict[str, Any] | str | None, BeforeValidator(_schema_or_text)]
OptionalSchema = Annotated[SchemaOrText, _Empty]
OptionalChoices = Annotated[list[str] | None, _Empty]


class JsonSchemaFormat(StrictBody):
    """The schema of `response_format`. Strict or not, the answer matches it."""

    name: str | None = Field(None, max_length=MAX_NAME)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictBody):
    """OpenAI's `response_format`, with the fields that other servers have in it."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="For json_object and json_schema.")
    pattern: str | None = Field(None, description="For regex.")
    grammar: str | None = Field(None, description="For grammar: GBNF, EBNF or Lark.")


class StructuredOutputs(BaseModel):
    """vLLM's `structured_outputs`."""

    model_config = ConfigDict(strict=True, extra="forbid", populate_by_name=True)

    json_: SchemaOrText = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = Field(None, description="Changes nothing: there is one backend.")
    disable_additional_properties: bool | None = Field(None, description="Changes nothing: objects are closed.")
    structural_tag: Literal[None] = None


class ConstraintFields(StrictBody):
    """Fields that say which form the answer must have. At most one form may be given."""

    response_format: ResponseFormat | None = None
    structured_outputs: Annotated[StructuredOutputs | None, _Empty] = None
    guided_json: OptionalSchema = None
    guided_regex: OptionalText = None
    guided_choice: OptionalChoices = None
    guided_grammar: OptionalText = None
    guided_whitespace_pattern: OptionalText = None
    grammar: OptionalText = Field(None, description="GBNF, EBNF or Lark.")
    grammar_string: OptionalText = Field(None, description="As grammar.")
    ebnf: OptionalText = Field(None, description="As grammar.")
    json_schema: OptionalSchema = None
    regex: OptionalText = None

    def answer_grammar(self) -> str | None:
        """The grammar that the answer must match, in Lark; None without constraints. Raises InvalidRequest."""
        whitespace = self._whitespace()
        given = self._given()
        if len(given) > 1:
            (first, *_), (second, *_) = given[:2]
            raise InvalidRequest(
                f"{second} and {first} both say which form the answer must have: send one of them",
                param=second,
                limit="one constraint",
            )
        if not given:
            self._refuse_lone_whitespace()
            return None
        param, value, make = given[0]
        return make(value, param, whitespace)

    @property
    def grammar_field(self) -> str:
        """The field that says which form the answer must have. Raises InvalidRequest."""
        return next((param for param, _, _ in self._given()), "grammar")

    def _given(self) -> "list[_Form]":
        forms = [*self._format_forms(), *self._structured_forms(), *self._plain_forms()]
        return [(param, value, make) for param, value, make in forms if value is not None]

    def _format_forms(self) -> "list[_Form]":
        chosen = self.response_format
        if chosen is None or chosen.type == "text":
            return []
        if chosen.type == "regex":
            return [("response_format.pattern", _present(chosen.pattern, "response_format.pattern"), _regex)]
        if chosen.type == "grammar":
            return [("response_format.grammar", _present(chosen.grammar, "response_format.grammar"), _grammar)]
        nested = None if chosen.json_schema is None else chosen.json_schema.schema_
        if nested is not None:
            return [("response_format.json_schema.schema", nested, _schema)]
        if chosen.type == "json_schema" and chosen.schema_ is None:
            param = "response_format.json_schema"
            _present(chosen.json_schema, param)
            _present(nested, f"{param}.schema")
        anything = {"type": "object"}
        return [("response_format.schema", anything if chosen.schema_ is None else chosen.schema_, _schema)]

    def _structured_forms(self) -> "list[_Form]":
        chosen = self.structured_outputs
        if chosen is None:
            return []
        return [
            ("structured_outputs.json", chosen.json_, _schema),
            ("structured_outputs.regex", chosen.regex, _regex),
            ("structured_outputs.choice", chosen.choice, _choice),
            ("structured_outputs.grammar", chosen.grammar, _grammar),
            ("structured_outputs.json_object", {"type": "object"} if chosen.json_object else None, _schema),
        ]

    def _plain_forms(self) -> "list[_Form]":
        return [
            ("guided_json", self.guided_json, _schema),
            ("guided_regex", self.guided_regex, _regex),
            ("guided_choice", self.guided_choice, _choice),
            ("guided_grammar", self.guided_grammar, _grammar),
            ("json_schema", self.json_schema, _schema),
            ("regex", self.regex, _regex),
            ("grammar", self.grammar, _grammar),
            ("grammar_string", self.grammar_string, _grammar),
            ("ebnf", self.ebnf, _grammar),
        ]

    def _whitespace(self) -> str | None:
        """The pattern of the space between parts of a JSON document; None if there is none."""
        chosen = self.structured_outputs
        if chosen is not None and chosen.disable_any_whitespace:
            return None
        for param, pattern in self._whitespace_patterns():
            if pattern is not None:
                if len(pattern) > MAX_PATTERN:
                    raise _too_long(param, pattern, MAX_PATTERN)
                return pattern
        return WHITESPACE

    def _whitespace_patterns(self) -> list[tuple[str, str | None]]:
        chosen = self.structured_outputs
        return [
            ("structured_outputs.whitespace_pattern", None if chosen is None else chosen.whitespace_pattern),
            ("guided_whitespace_pattern", self.guided_whitespace_pattern),
        ]

    def _refuse_lone_whitespace(self) -> None:
        for param, pattern in self._whitespace_patterns():
            if pattern is not None:
                raise InvalidRequest(
                    f"{param} is allowed only beside a JSON schema",
                    param=param,
                    limit="beside a JSON schema",
                    value=pattern[:80],
                )


def may_constrain(body: Mapping[str, Any]) -> bool:
    """Whether a body has fields that may become a grammar, which may take a while to read."""
    return not _CONSTRAINING.isdisjoint(body)


_CONSTRAINING = frozenset((*ConstraintFields.model_fields, "tools", "functions", "text", "format"))
_Make = Callable[[Any, str, str | None], str]
_Form = tuple[str, Any, _Make]


def _present(value: Any, param: str) -> Any:
    if value is None:
        raise InvalidRequest(f"{param} is missing", param=param, limit="present")
    return value


def _schema(value: dict[str, Any] | str, param: str, whitespace: str | None) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(
                f"{param} is not JSON: {error}", param=param, limit="JSON", value=short_repr(value)
            ) from None
    return lark_of_schema(value, param, whitespace=whitespace)


def _regex(pattern: str, param: str, whitespace: str | None) -> str:
    if not 0 < len(pattern) <= MAX_PATTERN:
        raise _too_long(param, pattern, MAX_PATTERN)
    return check_lark(f"start: {grammar.regex_terminal(f'(?:{pattern})')}", param)


def _choice(choices: Sequence[str], param: str, whitespace: str | None) -> str:
    if not 0 < len(choices) <= MAX_CHOICES_LISTED:
        limit = f"a list of 1 to {MAX_CHOICES_LISTED} texts"
        raise InvalidRequest(f"{param} must be {limit}, got {len(choices)}", param=param, limit=limit)
    if not all(choices):
        raise InvalidRequest(f"{param} has an empty text", param=param, limit="texts that are not empty")
    return check_lark("start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in choices), param)


def _grammar(text: str, param: str, whitespace: str | None) -> str:
    if not 0 < len(text) <= MAX_GRAMMAR_TEXT:
        raise _too_long(param, text, MAX_GRAMMAR_TEXT)
    if not grammar.is_lark(text):
        try:
            text = grammar.from_gbnf(text)
        except GrammarRefused as refused:
            raise _refused(param, refused) from None
    return check_lark(text, param)


def check_lark(lark: str, param: str) -> str:
    """Return a grammar in Lark as it is. Raises InvalidRequest."""
    try:
        check_syntax(lark)
    except GrammarRefused as refused:
        raise _refused(param, refused) from None
    return lark


def _refused(param: str, refused: GrammarRefused) -> InvalidRequest:
    return GrammarRefused(refused.reason, param)


def _too_long(param: str, text: str, limit: int) -> InvalidRequest:
    return InvalidRequest(
        f"{param} must have 1 to {limit} characters, got {len(text)}", param=param, limit=limit, value=len(text)
    )
