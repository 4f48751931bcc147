"""`ktqueue up` starts a private Redis, the gateway and the workers on this machine. `ktqueue down` stops them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ktqueue.cli.flags import CommonFlags, EngineFlags, GatewayFlags, ProfileFlags, expand, settings
from ktqueue.cli.model import with_model
from ktqueue.cli.terminal.console import notes, results
from ktqueue.cli.terminal.failures import require
from ktqueue.cli.terminal.progress import Waiting
from ktqueue.core.config import BrokerConfig, Config

MAX_WORKERS = 256
STORY = "Tell me a story about a fox and a crow."


@expand
def up(
    common: CommonFlags,
    engine: EngineFlags,
    gateway: GatewayFlags,
    profile: ProfileFlags,
    workers: Annotated[
        int, typer.Option("--workers", min=1, max=MAX_WORKERS, metavar="N", help="Worker processes.")
    ] = 1,
    bridge: Annotated[bool, typer.Option("--bridge", help="Also serve arq clients.")] = False,
    control: Annotated[
        bool | None,
        typer.Option("--control/--no-control", help="Run batches, webhooks and other chores.", show_default="control"),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Run in the background; `ktqueue down` stops it.")
    ] = False,
) -> None:
    """Start Redis (a private one, unless a URL is given), the gateway and the workers; Ctrl-C drains and stops them."""
    import asyncio

    from ktqueue.cli.connection import check_redis
    from ktqueue.workers.startup.device import check_device_is_here

    config = settings(common, engine=engine, gateway=gateway, profile=profile)
    if bridge:
        config = replace(config, bridge=replace(config.bridge, enabled=True))
    if control is not None:
        config = replace(config, control=replace(config.control, enabled=control))
    require("gateway", "worker", *(["arq"] if config.bridge.enabled or config.control.enabled else []))
    if config.storage.bucket is not None:
        require("s3")
    if config.broker.url is not None:
        check_redis(config)
    config = with_model(config)
    check_device_is_here(config.engine.device)
    if detach:
        _detached(config, workers)
        return
    try:
        asyncio.run(_up(config, workers))
    except asyncio.CancelledError:  # SIGTERM during the start
        raise KeyboardInterrupt from None


@expand
def down(common: CommonFlags) -> None:
    """Stop what `ktqueue up` runs on the state folder, and wait until it has stopped.

    Running jobs finish, or wait for the next start. A second `ktqueue down` during this time stops it at once.
    """
    from ktqueue.broker.redis.state_folder import holder
    from ktqueue.workers.supervision.detached import stop_detached

    config = settings(common)
    state = Path(config.broker.state_dir).absolute()
    try:
        with Waiting() as waiting:
            if holder(config.broker.state_dir) is not None:
                waiting.say("draining")
            stopped = stop_detached(config)
    except KeyboardInterrupt:
        notes().print("it is still stopping; `ktqueue down` again stops it at once", style="dim", markup=False)
        raise
    message = f"stopped; {state} keeps the jobs" if stopped else f"nothing runs on {state} (--state-dir names another)"
    results().print(message, markup=False, soft_wrap=True)


def _detached(config: Config, workers: int) -> None:
    from ktqueue.workers.supervision.detached import start_detached

    with Waiting() as waiting:
        running = start_detached(config, workers, waiting.say)
    _banner(running.config, running.models, how_to_stop=f"`ktqueue down{_where(config)}` drains and stops it")


async def _up(config: Config, workers: int) -> None:
    import asyncio
    import signal

    from ktqueue.core.logs import set_up_logging
    from ktqueue.workers.supervision.supervisor import Supervisor, served_models

    set_up_logging(config.log)
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # until everything has started
    with Waiting() as waiting:
        supervisor = Supervisor(config, workers=workers, report=waiting.say)
        await supervisor.__aenter__()
    try:
        models = await served_models(supervisor.config)
        _banner(supervisor.config, models, how_to_stop="Ctrl-C drains and stops")
        await supervisor.run_until_signal()
        notes().print("draining (Ctrl-C again stops at once)", style="dim")
    finally:
        await supervisor.stop()


def _where(config: Config) -> str:
    """Return the flag with which a command finds the state folder, if it needs one."""
    folder = config.broker.state_dir
    return "" if folder == BrokerConfig().state_dir else f" --state-dir {folder}"


def _banner(config: Config, models: Sequence[str], *, how_to_stop: str) -> None:
    from ktqueue.workers.supervision.supervisor import gateway_url

    console = results()
    model = models[0] if models else "demo"
    header = " -H 'Authorization: Bearer KEY'" if config.gateway.needs_key else ""
    url, where, state = gateway_url(config), _where(config), Path(config.broker.state_dir).absolute()
    console.print(f"[bold green]ready[/]  {', '.join(models)}  at  [bold]{url}/v1[/]", soft_wrap=True)
    console.print(
        f"""
  curl -N {url}/v1/chat/completions{header} -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": "{STORY}"}}]}}'

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="{"KEY" if config.gateway.needs_key else "none"}")
  messages = [{{"role": "user", "content": "{STORY}"}}]
  print(client.chat.completions.create(model="{model}", messages=messages).choices[0].message.content)

  ktqueue chat{where}        ktqueue submit "{STORY}"{where}
""",
        markup=False,
        soft_wrap=True,
    )
    if config.bridge.enabled:
        from ktqueue.cli.arq import arq_example

        assert config.broker.url is not None
        console.print("arq clients:", style="bold")
        console.print(_indented(arq_example(config, config.broker.url, model)), markup=False, soft_wrap=True)
    if config.broker.url is None or _is_private(config):
        console.print(
            f"from other folders: export KTQUEUE_BROKER_STATE_DIR={state}", style="dim", markup=False, soft_wrap=True
        )
    console.print(f"logs in {state}; {how_to_stop}", style="dim", markup=False, soft_wrap=True)


def _is_private(config: Config) -> bool:
    """Whether the Redis in use is the private server of the state folder."""
    from ktqueue.broker.redis.private_server import running_url

    return config.broker.url == running_url(config.broker.state_dir)


def _indented(program: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in program.splitlines()) + "\n"
