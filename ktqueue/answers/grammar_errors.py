"""Errors of an answer that must match a grammar, in its middle."""

from ktqueue.core.errors import EngineFailure, InvalidRequest


class GrammarFailed(EngineFailure):
    """A token does not match the grammar, or a limit was reached in the middle of an answer."""


class GrammarTooAmbiguous(GrammarFailed):
    """A limit was reached in the middle of an answer. The request asks for too much, so it would fail again."""

    code = InvalidRequest.code
    status = InvalidRequest.status
