"""Fields of other servers are aliases of ours, have no effect, or are refused by name, as documented."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted_worker import CARD

from ktqueue.core.errors import InvalidRequest
from ktqueue.openai import foreign_fields
from ktqueue.openai.chat import ChatBody, parse_chat
from ktqueue.openai.completions import CompletionBody, parse_completion
from ktqueue.openai.errors import UnsupportedParameter

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "http-api.md"
CHAT: dict[str, Any] = {"model": "tale", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION: dict[str, Any] = {"model": "tale", "prompt": "Hi"}
ALIASED: dict[str, Any] = {
    "max_tokens": 7,
    "min_tokens": 2,
    "repetition_penalty": 1.2,
    "stop": ("END",),
    "seed": 5,
    "ignore_eos": True,
}


def _field_rows() -> list[tuple[str, str]]:
    """Names of fields and how they are handled, one row for each way of handling."""
    handling = {name: f"means `{ours}`" for name, ours in foreign_fields.ALIASES.items()}
    handling |= {name: f"changes nothing: {why}" for name, why in foreign_fields.HINTS.items()}
    handling |= {name: f"refused unless {rule.allowed}: {rule.advice}" for name, rule in foreign_fields.REFUSED.items()}
    handling |= {
        name: f"refused in chats unless {rule.allowed}: {rule.advice}"
        for name, rule in foreign_fields.REFUSED_IN_CHATS.items()
    }
    handling |= {
        name: f"refused in completions unless {rule.allowed}: {rule.advice}"
        for name, rule in foreign_fields.REFUSED_IN_COMPLETIONS.items()
    }
    by_way: dict[str, list[str]] = {}
    for name, way in handling.items():
        by_way.setdefault(way, []).append(f"`{name}`")
    return [(", ".join(names), way) for way, names in by_way.items()]


def test_the_documentation_has_the_table() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    rows = [f"| {names} | {fate} |" for names, fate in _field_rows()]
    missing = [row for row in rows if row not in text]
    assert not missing, "\n".join(missing)
    _, _, table = text.partition("| field of another server |")
    assert [line for line in table.splitlines()[2:] if line.startswith("| `")][: len(rows) + 1] == rows


def test_no_field_is_handled_in_two_ways() -> None:
    ours = set(ChatBody.model_fields) | set(CompletionBody.model_fields)
    aliases, hints, refused = (
        set(table) for table in (foreign_fields.ALIASES, foreign_fields.HINTS, foreign_fields.REFUSED)
    )
    assert not aliases & hints
    assert not (aliases | hints) & (refused | ours | set(foreign_fields.REFUSED_IN_CHATS))
    assert set(foreign_fields.REFUSED_IN_CHATS) <= set(CompletionBody.model_fields) - set(ChatBody.model_fields)
    assert not refused & ours
    assert set(foreign_fields.REFUSED_IN_COMPLETIONS) <= set(ChatBody.model_fields) - set(CompletionBody.model_fields)
    assert set(foreign_fields.ALIASES.values()) <= ours


@pytest.mark.parametrize("name", foreign_fields.ALIASES)
def test_an_alias_is_honoured(name: str) -> None:
    ours = foreign_fields.ALIASES[name]
    value: Any = list(ALIASED[ours]) if ours == "stop" else ALIASED[ours]
    sampling = parse_completion({**COMPLETION, name: value}).requests(None)[0].sampling
    assert getattr(sampling, ours) == ALIASED[ours]
    assert getattr(parse_chat({**CHAT, name: value}).request(None).sampling, ours) == ALIASED[ours]
    with pytest.raises(InvalidRequest) as caught:
        parse_chat({**CHAT, name: value, ours: 99})
    assert caught.value.param == name


@pytest.mark.parametrize("name", foreign_fields.REFUSED)
def test_a_refusal_names_the_field(name: str) -> None:
    for parse, body in ((parse_chat, CHAT), (parse_completion, COMPLETION)):
        with pytest.raises(UnsupportedParameter) as caught:
            parse({**body, "repetition_penalty": 1.5, name: {"of": "course"}})
        assert caught.value.param == name
        assert name in caught.value.message
        assert caught.value.limit
        parse({**body, name: None})


@pytest.mark.parametrize("name", foreign_fields.REFUSED_IN_CHATS)
def test_what_only_completions_have_is_refused_in_chats(name: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        parse_chat({**CHAT, name: "something"})
    assert caught.value.param == name


def test_a_neutral_value_of_a_refused_field_is_accepted() -> None:
    parse_chat(
        {
            **CHAT,
            "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "best_of": 1, "typical_p": 1.0,
            "mirostat": 0, "mirostat_tau": 5.0, "top_a": 0, "tfs_z": 1, "dry_multiplier": 0.0, "dry_base": 1.75,
            "xtc_probability": 0, "xtc_threshold": 0.1, "repeat_last_n": 64, "repeat_penalty": 1.0, "n_probs": 0,
            "top_n_sigma": -1, "length_penalty": 1.0, "use_beam_search": False, "n_predict": -1, "samplers": [],
            "stream": True, "stream_options": {"continuous_usage_stats": False},
        }
    )  # fmt: skip
    counted = {"include_usage": True, "continuous_usage_stats": True}  # of guidellm, which needs the last counts only
    assert parse_chat({**CHAT, "stream": True, "stream_options": counted}).wants_usage()
    with pytest.raises(UnsupportedParameter):
        parse_chat({**CHAT, "typical_p": True})
    with pytest.raises(InvalidRequest, match="n_predict must be at least 0"):
        parse_completion({**COMPLETION, "n_predict": -1})


def test_completions_have_no_tools() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    for wanted in ({"tools": [tool]}, {"tools": [tool], "tool_choice": "auto"}, {"tool_choice": "auto"}):
        with pytest.raises(UnsupportedParameter, match="use /v1/chat/completions"):
            parse_completion({**COMPLETION, **wanted})
    parse_completion({**COMPLETION, "tools": [tool], "tool_choice": "none"})


def test_tools_are_refused_for_a_model_whose_calls_cannot_be_read() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    with pytest.raises(UnsupportedParameter, match="cannot call tools"):
        parse_chat({**CHAT, "tools": [tool]}).request(CARD)
    assert parse_chat({**CHAT, "tools": [tool], "tool_choice": "none"}).request(CARD).tools == ()
    offered = parse_chat({**CHAT, "tools": [tool]}).request(replace(CARD, tool_parser="tool_call"))
    assert (offered.tools, offered.tool_parser) == ((tool,), "tool_call")
