"""The access log: one line for each request, with the fields that operators need and nothing private."""

import json
import logging
import re
import sys
from typing import Any

import pytest

from ktqueue.core.logs import JsonFormatter

CHAT = "/v1/chat/completions"
BODY = {"model": "tale", "messages": [{"role": "user", "content": "a secret tale"}]}


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "ktqueue.access"]


async def test_each_request_is_one_line(http: Any, worker: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    answer = await http.post(f"{CHAT}?key=hidden", json=BODY, headers={"x-request-id": "mine"})
    await http.get("/v1/jobs/no%0Abody?api_key=hidden", headers={"authorization": "Bearer hidden"})
    first, second = lines(caplog)
    job_id = answer.headers["x-job-id"]
    expected = rf"POST {CHAT} 200 milliseconds=[\d.]+ tenant=default request_id=mine job_id={job_id}"
    assert re.fullmatch(expected, first.getMessage())
    assert re.match(
        r"GET /v1/jobs/no\\nbody 404 milliseconds=[\d.]+ tenant=default request_id=req-", second.getMessage()
    )
    said = first.getMessage() + second.getMessage()
    assert "hidden" not in said
    assert "secret tale" not in said
    as_json = json.loads(JsonFormatter().format(first))
    assert (as_json["level"], as_json["logger"]) == ("info", "ktqueue.access")
    assert (as_json["path"], as_json["status"], as_json["job_id"]) == (CHAT, 200, job_id)


def test_json_lines_have_the_exception_too() -> None:
    try:
        raise ValueError("no\nway")
    except ValueError:
        record = logging.LogRecord("here", logging.ERROR, "", 1, "went %s", ("wrong",), sys.exc_info())
    line = JsonFormatter().format(record)
    assert "\n" not in line
    parsed = json.loads(line)
    assert parsed["message"] == "went wrong"
    assert "ValueError: no\nway" in parsed["exception"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", parsed["time"])
