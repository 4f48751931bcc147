"""A process that answers lines, when the one that started it has died."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("ktqueue.answers.grammar_process", b'["start: /a/",true]\n'),
        ("ktqueue.loading.tokenizer.template_process", b'{"source":"a","special":{}}\n'),
        ("ktqueue.loading.tokenizer.template_process", b""),
    ],
)
def test_it_ends_without_a_traceback_if_its_parent_was_killed(module: str, line: bytes) -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None  # `communicate` would read it
        assert process.communicate(line)[1] == b""
