"""`ktqueue doctor`: can this machine run ktqueue?"""

import typer

from ktqueue.cli.flags import AsJson, CommonFlags, EngineFlags, GatewayFlags, expand, settings
from ktqueue.cli.terminal.console import results, table, write_json
from ktqueue.cli.terminal.failures import ExitCode


@expand
def doctor(common: CommonFlags, engine: EngineFlags, gateway: GatewayFlags, as_json: AsJson = False) -> None:
    """Check this machine: packages, kernels, cores, memory, model, Redis, port."""
    from ktqueue.cli.doctor.checks import Level, examine

    config = settings(common, engine=engine, gateway=gateway)
    findings = list(examine(config))
    failed = any(finding.level is Level.FAIL for finding in findings)
    if as_json:
        write_json(
            {
                "ok": not failed,
                "findings": [
                    {"name": f.name, "level": f.level.value, "fact": f.fact, "hint": f.hint or None} for f in findings
                ],
            }
        )
    else:
        colours = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}
        made = table(("", "what", "found"))
        for finding in findings:
            made.add_row(
                f"[{colours[finding.level]}]{finding.level.value}[/]",
                finding.name,
                _escape(finding.fact) + (f"\n[dim]{_escape(finding.hint)}[/]" if finding.hint else ""),
            )
        results().print(made)
    if failed:
        raise typer.Exit(ExitCode.FAILED)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
