"""The web page in a real browser: Debian's Chromium, headless. Without one these tests are skipped."""

import asyncio
import json
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from ktqueue.core.config import ControlConfig

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.async_api")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
    pytest.mark.timeout(200),
    pytest.mark.asyncio(loop_scope="module"),
]

ANSWER = "#messages > li.assistant .text"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(start_stack: Any) -> AsyncIterator[Any]:
    """One installation for all tests."""
    async with start_stack(control=ControlConfig()) as running:
        await running.until_ready()
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Any]:
    """One browser for all tests."""
    async with playwright.async_playwright() as driver:
        opened = await driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield opened
        await opened.close()


@pytest_asyncio.fixture(loop_scope="module")
async def page(stack: Any, browser: Any) -> AsyncIterator[Any]:
    """The page in a new session. At the end: it raised no error, and asked no other host for anything."""
    faults: list[str] = []
    hosts: set[str] = set()
    opened = await browser.new_page()
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.on("console", lambda line: faults.append(line.text) if line.type == "error" else None)
    opened.on("request", lambda request: hosts.add(re.sub(r"^(\w+://[^/]+).*|^data:.*", r"\1", request.url)))
    await opened.goto(str(stack.http.base_url))
    yield opened
    await opened.close()
    assert faults == []
    assert hosts - {""} == {str(stack.http.base_url).rstrip("/")}


async def set_options(page: Any, max_tokens: int) -> None:
    await page.locator("#options > summary").click()
    await page.fill("#temperature", "0")
    await page.fill("#max-tokens", str(max_tokens))
    await page.locator("#options > summary").click()


async def ask(page: Any, text: str, max_tokens: int = 60) -> None:
    await set_options(page, max_tokens)
    await page.fill("#question", text)
    await page.press("#question", "Enter")


async def whole(page: Any) -> str:
    """The model's answer, once it has ended."""
    await page.locator("#stop").wait_for(state="hidden", timeout=90_000)
    return str(await page.locator(ANSWER).last.text_content())


async def until_it_says(page: Any, characters: int) -> None:
    """Wait until the answer has so many characters."""
    written = re.compile(f".{{{characters}}}", re.DOTALL)
    await playwright.expect(page.locator(ANSWER).first).to_have_text(written, timeout=60_000)


async def expected(stack: Any, text: str, max_tokens: int = 60) -> str:
    messages = [{"role": "user", "content": text}]
    body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": max_tokens}
    answer = (await stack.http.post("/v1/chat/completions", json=body)).json()
    return str(answer["choices"][0]["message"]["content"])


async def test_a_chat_streams_and_its_answer_is_that_of_the_api(stack: Any, page: Any) -> None:
    await ask(page, "Tell me of a king.")
    await until_it_says(page, 20)
    assert await whole(page) == await expected(stack, "Tell me of a king.")


async def test_an_answer_survives_a_reload_and_the_death_of_its_worker(stack: Any, page: Any) -> None:
    await ask(page, "Tell me of a queen.", 300)
    await until_it_says(page, 20)
    os.kill(stack.up.workers[0].pid, signal.SIGKILL)
    await page.reload()
    assert await whole(page) == await expected(stack, "Tell me of a queen.", 300)
    assert await page.locator("#messages > li").count() == 2


async def test_stop_keeps_what_was_written_and_the_job_ends(stack: Any, page: Any) -> None:
    await ask(page, "Tell me of a fox.", 400)
    await until_it_says(page, 20)
    await page.keyboard.press("Escape")
    kept = await whole(page)
    assert len(kept) >= 20
    async with asyncio.timeout(20):
        while any(job["state"] == "running" for job in (await stack.http.get("/v1/jobs")).json()["data"]):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert await page.locator(ANSWER).last.text_content() == kept


async def test_a_message_can_be_edited_and_an_answer_made_again(stack: Any, page: Any) -> None:
    await ask(page, "Tell me of a hen.")
    first = await whole(page)
    await page.get_by_role("button", name="Regenerate").click()
    assert await whole(page) == first
    await page.get_by_role("button", name="Edit").click()
    assert await page.input_value("#question") == "Tell me of a hen."
    assert await page.locator("#messages > li").count() == 0


async def test_a_text_file_becomes_part_of_the_message(page: Any, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("the fox is red\n<b>not HTML</b>")
    await set_options(page, 8)
    await page.set_input_files("#attach", file)
    await playwright.expect(page.locator("#question")).to_have_value(re.compile("red"), timeout=30_000)
    await page.press("#question", "Enter")
    block = page.locator("#messages > li.user pre")
    assert await block.text_content() == "the fox is red\n<b>not HTML</b>\n"
    await whole(page)


async def test_the_queue_shows_the_worker_and_the_job(stack: Any, page: Any) -> None:
    await ask(page, "Tell me of a cat.")
    await whole(page)
    await page.get_by_role("button", name="Queue", exact=True).click()
    await page.locator("#workers td", has_text="demo").first.wait_for()
    await page.locator("#jobs td", has_text="done").first.wait_for()
    assert (await page.locator("#first-token-now").text_content()).endswith(" s")


async def create_batch(stack: Any, *bodies: dict[str, Any]) -> str:
    """Create a batch of /v1/completions and return its id."""
    common = {"method": "POST", "url": "/v1/completions"}
    lines = [json.dumps({"custom_id": f"c{n}", **common, "body": body}) for n, body in enumerate(bodies)]
    files = {"file": ("in.jsonl", "\n".join(lines).encode())}
    file = (await stack.http.post("/v1/files", data={"purpose": "batch"}, files=files)).json()
    wanted = {"input_file_id": file["id"], "endpoint": common["url"], "completion_window": "24h"}
    return str((await stack.http.post("/v1/batches", json=wanted)).json()["id"])


async def test_the_queue_shows_batches_cancels_them_and_downloads_their_output(stack: Any, page: Any) -> None:
    await page.get_by_role("button", name="Queue", exact=True).click()
    body = {"model": "demo", "prompt": "Once", "max_tokens": 4}
    done = await create_batch(stack, body, body | {"temperature": 9})
    faulty = await create_batch(stack, {"prompt": "no model"})
    endless = await create_batch(stack, body | {"max_tokens": 100_000, "ignore_eos": True})
    row = page.locator("#batches tr", has_text=done)
    await row.get_by_text("2 of 2, 1 failed").wait_for()
    async with page.expect_download() as download:
        await row.get_by_role("button", name=f"Output of {done}").click()
    output = (await stack.http.get(f"/v1/batches/{done}")).json()["output_file_id"]
    stored = (await stack.http.get(f"/v1/files/{output}/content")).text
    saved = await (await download.value).path()
    assert await asyncio.to_thread(saved.read_text) == stored and '"c0"' in stored
    await page.locator("#batches tr", has_text=faulty).get_by_text("line 1: body.model is missing").wait_for()
    await page.get_by_role("button", name=f"Cancel {endless}").click()
    await page.locator("#batches tr", has_text=endless).get_by_text("cancelled").wait_for()


async def test_a_phone_needs_no_sideways_scrolling(page: Any) -> None:
    await page.set_viewport_size({"width": 360, "height": 640})
    for view in ("Chat", "Queue"):
        await page.get_by_role("button", name=view, exact=True).click()
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")


async def test_every_control_has_a_name_for_screen_readers(page: Any) -> None:
    nameless = """[...document.querySelectorAll('button, input, progress, select, textarea, svg')].filter(
        (node) => !(node.textContent.trim() || node.getAttribute('aria-label') || node.labels?.length))
        .map((node) => node.outerHTML)"""
    assert await page.evaluate(nameless) == []
