"""The files of the web page, and GET /v1/status, which feeds it. tests/e2e/test_page.py opens it in a browser."""

import httpx
import jsonschema
import pytest
from scripted_worker import ScriptedWorker
from served_gateway import ServeWith

from ktqueue.core.tenants import TenantConfig, hash_of

HTML = {"accept": "text/html,application/xhtml+xml"}


async def test_browsers_get_the_page_and_other_clients_a_list_of_routes(http: httpx.AsyncClient) -> None:
    page = await http.get("/", headers=HTML)
    assert page.headers["content-type"].startswith("text/html")
    assert "<title>ktqueue</title>" in page.text
    assert (await http.get("/")).text.startswith("ktqueue ")


@pytest.mark.parametrize("path", ["/", "/page.css", "/page.js"])
async def test_the_page_may_load_nothing_from_elsewhere(http: httpx.AsyncClient, path: str) -> None:
    response = await http.get(path, headers=HTML)
    policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "http://" not in response.text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in response.text


async def test_the_page_needs_no_key_but_its_data_do(serve_with: ServeWith) -> None:
    tenants = (TenantConfig(name="one", keys=(hash_of("tenant"),)),)
    async with (
        serve_with(api_keys=(hash_of("operator"),), tenants=tenants) as (_, url),
        httpx.AsyncClient(base_url=url) as http,
    ):
        for path in ("/", "/page.css", "/page.js"):
            assert (await http.get(path, headers=HTML)).status_code == 200
        keys = {key: {"authorization": f"Bearer {key}"} for key in ("operator", "tenant", "stranger")}
        answers = {key: (await http.get("/v1/status", headers=headers)).status_code for key, headers in keys.items()}
    assert answers == {"operator": 200, "tenant": 403, "stranger": 401}


async def test_the_page_can_be_switched_off(serve_with: ServeWith) -> None:
    async with serve_with(web_page=False) as (_, url), httpx.AsyncClient(base_url=url) as http:
        assert (await http.get("/", headers=HTML)).text.startswith("ktqueue ")
        assert (await http.get("/page.js")).status_code == 404


async def test_the_status_counts_workers_queues_and_first_tokens(
    http: httpx.AsyncClient, worker: ScriptedWorker
) -> None:
    await http.post("/v1/completions", json={"model": "tale", "prompt": "x"})
    status = (await http.get("/v1/status")).json()
    document = (await http.get("/openapi.json")).json()
    schema = {"$ref": "#/components/schemas/Status", "components": document["components"]}
    jsonschema.Draft202012Validator(schema).validate(status)
    assert [each["model"] for each in status["workers"]] == ["tale"]
    assert {(queue["model"], queue["job_class"]) for queue in status["queues"]} >= {("tale", "interactive")}
    assert status["first_token"]["count"] == 1
