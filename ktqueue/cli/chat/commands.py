"""Commands of `ktqueue chat`, lines that begin with a slash: show, change, save or load the conversation."""

import dataclasses
import json
import types
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ktqueue.cli.terminal.failures import UsageFault
from ktqueue.core.errors import InvalidRequest, KtqueueError
from ktqueue.core.request import SamplingParams

HELP = """\
/help                show this
/system [TEXT]       show the system message, or start again with a new one
/set [NAME [VALUE]]  show sampling parameters, set one, or reset it
/save FILE           write the conversation to a JSON file
/load FILE           continue a conversation from a file
/reset               start a new conversation
/exit                exit, like Ctrl-D
Ctrl-C stops an answer. \"\"\" begins and ends a message of several lines;
pasted lines are one message. /system "" removes it."""
MAX_FILE_BYTES = 16 << 20
SETTABLE = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
            "frequency_penalty", "seed", "stop")  # fmt: skip


@dataclasses.dataclass(slots=True)
class Talk:
    """A conversation: its messages without the system message, and how answers are sampled."""

    sampling: SamplingParams
    system: str | None = None
    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def all_messages(self) -> list[dict[str, Any]]:
        """All messages, as the model gets them."""
        opening = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*opening, *self.messages]


def obey(talk: Talk, line: str) -> str:
    """Run a command line and return the text to show. Raises KtqueueError, OSError."""
    word, _, rest = line.strip().partition(" ")
    rest = rest.strip()
    match word:
        case "/help" | "/?":
            return HELP
        case "/reset" | "/clear":
            talk.messages.clear()
            return "a new conversation"
        case "/system":
            return _system(talk, rest)
        case "/set":
            return _set(talk, *rest.split(None, 1))
        case "/save":
            return _save(talk, _file(word, rest))
        case "/load":
            return _load(talk, _file(word, rest))
    raise UsageFault(f"unknown command {word}; /help lists the commands")


def _system(talk: Talk, text: str) -> str:
    if not text:
        return "no system message" if talk.system is None else talk.system
    talk.system = None if text == '""' else text
    talk.messages.clear()
    return "a new conversation" + (" without a system message" if talk.system is None else "")


def _set(talk: Talk, name: str = "", value: str | None = None) -> str:
    if not name:
        return "\n".join(f"{parameter} = {getattr(talk.sampling, parameter)}" for parameter in SETTABLE)
    if name not in SETTABLE:
        raise UsageFault(f"unknown parameter {name!r}; known: {', '.join(SETTABLE)}")
    default = getattr(SamplingParams(), name)
    changed = default if value is None else _value(name, value)
    talk.sampling = dataclasses.replace(talk.sampling, **{name: changed})
    return f"{name} = {changed}"


def _value(name: str, text: str) -> Any:
    hint = get_type_hints(SamplingParams)[name]
    if name == "stop":
        return (text,)
    kinds = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kind = int if int in kinds and float not in kinds else float
    try:
        return kind(text)
    except ValueError as error:
        wanted = "a whole number" if kind is int else "a number"
        raise InvalidRequest(f"{name} must be {wanted}, got {text!r}", param=name, value=text) from error


def _file(word: str, name: str) -> Path:
    if not name:
        raise UsageFault(f"{word} needs a file name")
    return Path(name).expanduser()


def _save(talk: Talk, path: Path) -> str:
    path.write_text(json.dumps({"messages": talk.all_messages}, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    return f"saved {len(talk.messages)} messages to {path}"


def _load(talk: Talk, path: Path) -> str:
    with path.open("rb") as file:
        raw = file.read(MAX_FILE_BYTES + 1)
    if len(raw) > MAX_FILE_BYTES:
        raise UsageFault(f"{path}: longer than {MAX_FILE_BYTES >> 20} MiB")
    try:
        messages = json.loads(raw)["messages"]
        valid = all(isinstance(message["role"], str) and isinstance(message["content"], str) for message in messages)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageFault(f"{path}: not a conversation that /save wrote") from error
    if not valid or not isinstance(messages, list):
        raise KtqueueError(f"{path}: not a conversation that /save wrote")
    has_system = bool(messages) and messages[0]["role"] == "system"
    talk.system = messages[0]["content"] if has_system else None
    talk.messages[:] = messages[has_system:]
    return f"loaded {len(talk.messages)} messages from {path}"
