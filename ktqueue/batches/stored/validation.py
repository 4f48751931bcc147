"""Checks every line of a batch's input before anything runs, and makes its index."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from ktqueue.batches.id_set import IdSet
from ktqueue.batches.input import BatchLine, LineFault, parse_line
from ktqueue.batches.stored.index import LineIndex, beginning_key
from ktqueue.batches.stored.lines import stored_lines
from ktqueue.storage.store import NotStored, Store

MAX_LINES = 50_000  # as in OpenAI's batches
MAX_FAULTS = 50  # that a batch object shows
LINES_PER_PAUSE = 200  # that are checked before other tasks run


@dataclass(slots=True)
class Findings:
    """What the check found: the index and the model, or faults as {code, message, param, line}."""

    index: LineIndex = field(default_factory=LineIndex)
    model: str | None = None
    faults: list[Mapping[str, Any]] = field(default_factory=list)

    def refuse(self, code: str, message: str, *, param: str | None = None, line: int | None = None) -> None:
        """Add a fault, unless there are enough of them."""
        if len(self.faults) < MAX_FAULTS:
            self.faults.append({"code": code, "message": message, "param": param, "line": line})


async def check_input(
    store: Store, name: str, endpoint: str, served: Callable[[str], Awaitable[str | None]]
) -> Findings:
    """Check the stored file `name`, whose lines must all be for `endpoint`.

    `served` says why a model cannot be used, or None if it can; it may wait for workers. Raises what `served` raises.
    """
    findings = Findings()
    ids = IdSet()
    try:
        async with aclosing(stored_lines(store, name)) as lines:
            async for raw in lines:
                if len(findings.index) >= MAX_LINES:
                    findings.refuse("too_many_lines", f"a batch has at most {MAX_LINES} lines", line=raw.number)
                    break
                if len(findings.faults) >= MAX_FAULTS:
                    break
                try:
                    line = parse_line("line", raw.number, raw.data, urls=(endpoint,), plain_allowed=False)
                except LineFault as fault:
                    findings.refuse(fault.kind, fault.reason, param=fault.param, line=fault.number)
                    continue
                await _check_line(findings, ids, line, served)
                findings.index.add(raw.offset, raw.length, raw.number, beginning_key(line.body))
                if len(findings.index) % LINES_PER_PAUSE == 0:
                    await asyncio.sleep(0)
    except NotStored:
        findings.refuse("file_not_found", "the input file was deleted", param="input_file_id")
    if not len(findings.index) and not findings.faults:
        findings.refuse("empty_file", "the input file has no lines", param="input_file_id")
    return findings


async def _check_line(
    findings: Findings, ids: IdSet, line: BatchLine, served: Callable[[str], Awaitable[str | None]]
) -> None:
    if not ids.add(line.custom_id):
        message = f"custom_id {line.custom_id!r} was used before"
        findings.refuse("duplicate_custom_id", message, param="custom_id", line=line.number)
    model = line.body.get("model")
    if model and not isinstance(model, str):
        message = f"body.model must be a text, got {model!r:.80}"
        findings.refuse("invalid_model", message, param="body.model", line=line.number)
    elif not model:
        findings.refuse("missing_model", "body.model is missing", param="body.model", line=line.number)
    elif findings.model is None:
        findings.model = model
        reason = await served(model)
        if reason is not None:
            findings.refuse("model_not_found", reason, param="body.model", line=line.number)
    elif model != findings.model:
        message = f"all lines of a batch need the same model: the first has {findings.model!r}, this one {model!r:.80}"
        findings.refuse("mismatched_model", message, param="body.model", line=line.number)
