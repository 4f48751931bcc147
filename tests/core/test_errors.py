"""Errors become plain data and are the same errors when they are read again."""

import inspect

import pytest

from ktqueue.core import errors
from ktqueue.core.errors import ErrorInfo, KtqueueError, error_of

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, KtqueueError)]


@pytest.mark.parametrize("kind", KINDS)
def test_errors_survive_a_round_trip(kind: type[KtqueueError]) -> None:
    error = kind("text", param="field", limit=3, value="4", retry_after=1.0)
    again = error_of(error.info())
    assert type(again) is kind
    assert (again.message, again.param, again.limit, again.value) == ("text", "field", 3, "4")
    assert again.info() == error.info()


def test_codes_are_stable_and_single() -> None:
    codes = {kind.code: kind.status for kind in KINDS}
    assert len(codes) == len(KINDS)
    assert codes["queue_full"] == 429
    assert codes["context_length_exceeded"] == 400
    assert codes["deadline_exceeded"] == 504


def test_a_code_of_a_newer_version_is_still_an_error() -> None:
    assert type(error_of(ErrorInfo(code="later", message="text"))) is KtqueueError
