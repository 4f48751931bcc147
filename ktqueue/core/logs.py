"""Logging of every process: to standard error, with a time and a level in each line, as text or as JSON lines."""

import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from ktqueue.core.codec import dumps
from ktqueue.core.config import Config, LogConfig, load_config

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
# At INFO these log every request and job, including webhook URLs and job arguments, which contain prompts.
QUIET_LIBRARIES = ("httpx", "httpcore", "arq.worker", "uvicorn.access")


def set_up_logging(config: LogConfig) -> None:
    """Send the log of this process to standard error. Call this once, when a process starts."""
    handler = _StandardError()
    handler.setFormatter(JsonFormatter() if config.format == "json" else logging.Formatter(TEXT_FORMAT))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.level.upper())
    for name in QUIET_LIBRARIES:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(True)


def configure_process(environment: Mapping[str, str]) -> Config:
    """Load the settings from the environment and set up the log as they say.

    Raises ConfigError. The log is set up by then, so the error can be logged.
    """
    set_up_logging(LogConfig())
    config = load_config(environment=environment)
    set_up_logging(config.log)
    return config


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (RFC 3339, UTC), level, logger, message, the fields of the record, exception."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return dumps(line).decode()


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, which a progress bar replaces while it is shown."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        """Standard error."""
        return sys.stderr

    @stream.setter
    def stream(self, stream: TextIO) -> None:
        raise AttributeError("the log goes to standard error")
