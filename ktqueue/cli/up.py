"""`ktqueue up`: everything on this machine: a private Redis, the gateway, the workers."""

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ktqueue.cli.console import notes, results
from ktqueue.cli.flags import CommonFlags, EngineFlags, GatewayFlags, expand, settings
from ktqueue.cli.model import with_model
from ktqueue.core.config import BrokerConfig, Config

if TYPE_CHECKING:
    from ktqueue.workers.supervise import Supervisor

STORY = "Tell me a story about a fox and a crow."


@expand
def up(
    common: CommonFlags,
    engine: EngineFlags,
    gateway: GatewayFlags,
    workers: Annotated[int, typer.Option("--workers", min=1, metavar="N", help="Worker processes.")] = 1,
    bridge: Annotated[bool, typer.Option("--bridge", help="Serve arq's clients, too.")] = False,
    control: Annotated[bool, typer.Option("--control", help="Call webhooks, and do other chores.")] = False,
) -> None:
    """Start Redis (a private one, unless a URL is given), the gateway and the workers; Ctrl-C drains and stops them."""
    import asyncio

    from ktqueue.workers.device import check_device_is_here

    config = with_model(settings(common, engine=engine, gateway=gateway))
    check_device_is_here(config.engine.device)
    if bridge:
        config = replace(config, bridge=replace(config.bridge, enabled=True))
    if control:
        config = replace(config, control=replace(config.control, enabled=True))
    asyncio.run(_up(config, workers))


async def _up(config: Config, workers: int) -> None:
    from ktqueue.workers.supervise import Supervisor

    with Waiting() as waiting:
        supervisor = Supervisor(config, workers=workers, report=waiting.say)
        await supervisor.__aenter__()
    try:
        _banner(supervisor, await served_models(supervisor.config))
        await supervisor.run_until_signal()
        notes().print("draining (Ctrl-C again stops at once)", style="dim")
    finally:
        await supervisor.stop()


async def served_models(config: Config) -> list[str]:
    """The names of the models that workers serve."""
    from ktqueue.broker.broker import Broker

    broker = await Broker.open(config.broker)
    try:
        return sorted(card.name for card in await broker.models.cards())
    finally:
        await broker.close()


class Waiting:
    """Says what is waited for: a spinner on a terminal, a line each elsewhere."""

    def __init__(self) -> None:
        self._console = notes()
        self._status = self._console.status("starting") if self._console.is_terminal else None

    def __enter__(self) -> "Waiting":
        if self._status is not None:
            self._status.start()
        return self

    def say(self, text: str) -> None:
        """Show what is waited for now."""
        if self._status is not None:
            self._status.update(text)
        else:
            sys.stderr.write(f"{text}\n")

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()


def _banner(supervisor: "Supervisor", models: list[str]) -> None:
    console = results()
    model = models[0] if models else "demo"
    config = supervisor.config
    asked = bool(config.gateway.api_keys or config.gateway.tenants)
    header = " -H 'Authorization: Bearer KEY'" if asked else ""
    where = "" if config.broker.state_dir == BrokerConfig().state_dir else f" --state-dir {config.broker.state_dir}"
    console.print(f"[bold green]ready[/]  {', '.join(models)}  at  [bold]{supervisor.url}/v1[/]", soft_wrap=True)
    console.print(
        f"""
  curl -N {supervisor.url}/v1/chat/completions{header} -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": "{STORY}"}}]}}'

  from openai import OpenAI
  client = OpenAI(base_url="{supervisor.url}/v1", api_key="{"KEY" if asked else "none"}")
  messages = [{{"role": "user", "content": "{STORY}"}}]
  print(client.chat.completions.create(model="{model}", messages=messages).choices[0].message.content)

  ktqueue chat{where}        ktqueue submit "{STORY}"{where}
""",
        markup=False,
        soft_wrap=True,
    )
    console.print(f"logs in {config.broker.state_dir}; Ctrl-C drains and stops", style="dim", markup=False)
