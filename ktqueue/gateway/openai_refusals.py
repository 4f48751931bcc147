"""Fields of OpenAI's and vLLM's requests whose meaning we cannot honour: refused by name, never dropped in silence.

Fields that only tell us something, or hint at an optimisation (user, store, prediction, verbosity,
prompt_cache_key ...), are accepted and change nothing. Pure; knows no pydantic.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ktqueue.gateway.faults import UnsupportedParameter
from ktqueue.gateway.openai_errors import shown

Neutral = Callable[[Any], bool]


def _absent(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def _is(*neutral: Any) -> Neutral:
    # The types are compared as well, because True == 1 in Python.
    return lambda value: any(value == one and type(value) is type(one) for one in neutral)


def _text_format(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


# Field: (values that ask for nothing special, what to do instead).
_REFUSED: Mapping[str, tuple[Neutral, str]] = {
    "response_format": (_text_format, 'only {"type": "text"} is served'),
    "tool_choice": (_is("auto", "none"), 'only "auto" and "none" are served'),
    "function_call": (_is("auto", "none"), "give tools instead"),
    "functions": (_absent, "give tools instead"),
    "audio": (_absent, "only text is served"),
    "modalities": (_is(["text"]), "only text is served"),
    "web_search_options": (_absent, "there is no web search"),
    "moderation": (_absent, "there is no moderation"),
    "echo": (_absent, "the prompt is not repeated"),
    "suffix": (_absent, "there is no insertion"),
    "prompt_logprobs": (_absent, "only generated tokens have logprobs"),
    "structured_outputs": (_absent, "output cannot be constrained"),
    "guided_json": (_absent, "output cannot be constrained"),
    "guided_regex": (_absent, "output cannot be constrained"),
    "guided_choice": (_absent, "output cannot be constrained"),
    "guided_grammar": (_absent, "output cannot be constrained"),
    "grammar": (_absent, "output cannot be constrained"),
    "json_schema": (_absent, "output cannot be constrained"),
    "regex": (_absent, "output cannot be constrained"),
    "ebnf": (_absent, "output cannot be constrained"),
    "structural_tag": (_absent, "output cannot be constrained"),
    "bad_words": (_absent, "use logit_bias"),
    "allowed_token_ids": (_absent, "use logit_bias"),
    "logits_processors": (_absent, "use logit_bias"),
    "include_stop_str_in_output": (_absent, "the stop string is never in the text"),
    "skip_special_tokens": (_is(True), "special tokens are never in the text"),
    "return_token_ids": (_absent, "the events of /v1/jobs have them"),
    "return_tokens_as_token_ids": (_absent, "the events of /v1/jobs have them"),
    "chat_template": (_absent, "the model's own is used"),
    "documents": (_absent, "give them in chat_template_kwargs"),
    "use_beam_search": (_absent, "there is no beam search"),
    "length_penalty": (_is(1, 1.0), "there is no beam search"),
    "truncate_prompt_tokens": (_absent, "prompts are not cut"),
    "continue_final_message": (_absent, "a new message is always begun"),
    "add_generation_prompt": (_is(True), "a new message is always begun"),
    "typical_p": (_is(1, 1.0), "use top_p or min_p"),
    "mirostat": (_is(0), "use top_p or min_p"),
    "thinking_token_budget": (_absent, "use max_completion_tokens"),
}


def refuse_unsupported(body: Mapping[str, Any], *, special_tokens: bool) -> None:
    """Raises UnsupportedParameter for the first field that asks for what we cannot do.

    `special_tokens`: whether the tokenizer adds its own to such a prompt; a chat template has them already.
    """
    always = f"it is always {str(special_tokens).lower()} here"
    rules = {**_REFUSED, "add_special_tokens": (_is(special_tokens), always)}
    for name, value in body.items():
        rule = rules.get(name)
        if rule is None or value is None:
            continue
        neutral, advice = rule
        if not neutral(value):
            raise UnsupportedParameter(
                f"{name} is not supported with the value {shown(value)}: {advice}",
                param=name,
                limit=advice,
                value=shown(value),
            )
    best_of, n = body.get("best_of"), body.get("n") or 1
    if best_of is not None and best_of != n:
        raise UnsupportedParameter(
            f"best_of must be equal to n ({shown(n)}), got {shown(best_of)}: all choices are returned",
            param="best_of",
            limit=shown(n),
            value=shown(best_of),
        )


def refused_fields() -> tuple[str, ...]:
    """The names of all fields that may be refused, for the documentation."""
    return (*sorted(_REFUSED), "add_special_tokens", "best_of")
