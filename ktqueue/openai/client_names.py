"""Names fields in errors as the client has sent them, where its API calls them differently."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ktqueue.core.errors import KtqueueError

Names = Sequence[tuple[str, str]]
"""Regular expressions that match the beginning of our name, and what takes its place. The first match counts."""


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
        if error.param is not None:
            theirs = client_name(error.param, names)
            error.message = error.message.replace(error.param, theirs)
            error.args = (error.message,)
            error.param = theirs
        raise
