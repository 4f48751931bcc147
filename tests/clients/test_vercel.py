"""Vercel's AI SDK, unchanged, in node: `vercel/calls.mjs` calls the server and writes what the SDK returned."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "vercel" / "calls.mjs"
FOLDER = Path(sys.prefix)
"""The environment of `make clients`, where npm has installed the packages."""
CITIES = ("Paris", "Rome")

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(
        shutil.which("node") is None or not (FOLDER / "node_modules" / "ai").exists(),
        reason="node and the package ai are not installed (make clients CLIENTS=vercel)",
    ),
]


@pytest.fixture(scope="module")
def returned(server: Any) -> dict[str, Any]:
    """What each function of the script returned."""
    # A program on stdin finds packages in the working directory.
    done = subprocess.run(
        ["node", "--input-type=module", "-", server.base_url, server.api_key, server.model],
        input=SCRIPT.read_text(),
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    results: dict[str, Any] = json.loads(done.stdout)
    assert [result for result in results.values() if "error" in result] == []
    return {name: result["value"] for name, result in results.items()}


class TestText:
    def test_stream_has_the_text_of_the_answer(self, returned: dict[str, Any]) -> None:
        plain, streamed = returned["text"], returned["streamed_text"]
        assert plain["text"] and len(streamed["parts"]) > 1 and "".join(streamed["parts"]) == plain["text"]
        for answer in (plain, streamed):
            assert answer["outputTokens"] == 48 and answer["finishReason"] == "length"

    def test_conversation_by_responses_refers_to_its_items(self, returned: dict[str, Any]) -> None:
        answer = returned["conversation"]
        assert answer["text"] and answer["kinds"] == ["user", "item_reference", "user"]

    def test_completion(self, returned: dict[str, Any]) -> None:
        assert returned["completion"]


class TestStructuredOutput:
    def test_objects(self, returned: dict[str, Any]) -> None:
        assert returned["object"]["sky"] in ("sunny", "cloudy", "rain") and set(returned["object"]) == {"sky", "windy"}
        assert returned["choice"] in ("sunny", "rain")
        assert set(returned["list"]["days"]) <= {"sun", "rain"}

    def test_streamed_object(self, returned: dict[str, Any]) -> None:
        streamed = returned["streamed_object"]
        assert streamed["last"] == streamed["object"] == returned["object"]


class TestTools:
    def test_function_is_called(self, returned: dict[str, Any]) -> None:
        answer = returned["tool"]
        (call,), (city,) = answer["calls"], answer["cities"]
        assert call == {"city": city} and city in CITIES
        assert answer["results"] == [f"It rains in {city}."] and answer["finishReason"] == "tool-calls"
        assert returned["named_tool"]["calls"] == [call]

    def test_streamed_call(self, returned: dict[str, Any]) -> None:
        answer = returned["streamed_tool"]
        assert len(answer["pieces"]) > 1
        assert [json.loads("".join(answer["pieces"]))] == answer["calls"] == returned["tool"]["calls"]
        assert answer["cities"] == returned["tool"]["cities"] and answer["finishReason"] == "tool-calls"

    def test_agent_answers_after_its_call(self, returned: dict[str, Any]) -> None:
        answer = returned["agent"]
        assert answer["steps"] == ["tool-calls", "length"] and len(answer["cities"]) == 1 and answer["text"]
