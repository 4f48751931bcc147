"""Names fields in errors as the client has sent them, where its API calls them differently."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ktqueue.core.errors import KtqueueError

Names = Sequence[tuple[str, str]]
"""Regular expressions that match the beginning of our name, and what takes its place. The first match counts."""

CHAT_NAMES: Names = ((r"prompt(?!\w)", "messages"),)
"""Those of a chat: what a worker calls the prompt."""


def client_name(param: str, names: Names) -> str:
    """The client's name of the field `param` of an OpenAI body."""
    for ours, theirs in names:
        if match := re.match(ours, param):
            return match.expand(theirs) + param[match.end() :]
    return param


@contextmanager
def client_names(names: Names) -> Iterator[None]:
    """Rename the field in an error that is raised inside, also in its message."""
    try:
        yield
    except KtqueueError as error:
        rename(error, names)
        raise


def rename(error: KtqueueError, names: Names) -> None:
    """Rename the field of an error, also in its message."""
    if error.param is None or (theirs := client_name(error.param, names)) == error.param:
        return
    error.message = re.sub(rf"(?<![\w.]){re.escape(error.param)}(?!\w)", lambda _: theirs, error.message)
    error.args = (error.message,)
    error.param = theirs
