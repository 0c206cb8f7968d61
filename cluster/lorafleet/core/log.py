"""Structured logs: one JSON object a line, to a file or to standard error.

It owns the form of a log line and knows nothing of what is logged. Libraries and our own modules
write through the standard `logging`; only a process's `main` calls `configure`, so that importing
lorafleet changes no logging of a host program.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from lorafleet.core.errors import InvalidInput

_LEVELS = ("debug", "info", "warning", "error")


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return a logger whose methods take an event and its facts as keywords.

    `log.info("adapter published", adapter="x")`; the name is usually `__name__`.
    """
    logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(name),
        wrapper_class=structlog.stdlib.BoundLogger,
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
    )
    return logger


def configure(process: str, *, file: Path | None = None, level: str = "info") -> None:
    """Send every log record of this process to one place as JSON lines.

    Parameters
    ----------
    process : str
        Stands in each line, so that the files of several processes can be merged.
    file : Path, optional
        Appended to, its folder made when absent; standard error when not given.
    level : str
        `debug`, `info`, `warning` or `error`.

    Raises
    ------
    InvalidInput
        The level is none of those.

    Notes
    -----
    Calling it again replaces what the call before set up.
    """
    if level not in _LEVELS:
        raise InvalidInput(
            f"log level {level!r} is not known: expected one of {', '.join(_LEVELS)}", field="level"
        )
    handler: logging.Handler
    if file is None:
        handler = logging.StreamHandler(sys.stderr)
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(file, encoding="utf-8")
    handler.setFormatter(_formatter(process))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(level.upper())


def _formatter(process: str) -> logging.Formatter:
    """Render our records and those of other libraries alike."""

    def add_process(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event["process"] = process
        return event

    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_process,
    ]
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[structlog.stdlib.ExtraAdder()],
        processors=[
            *shared,
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str),
        ],
    )
