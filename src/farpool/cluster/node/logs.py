"""Log of a node: events with fields, as lines for people or as JSON."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

import msgspec

__all__ = ["configure", "log"]

_LOGGER = logging.getLogger("farpool.node")


def log(event: str, *, level: int = logging.INFO, **fields: object) -> None:
    """Log an event with its fields.

    Parameters
    ----------
    event : str
        One or a few words that identify the kind of event.
    level : int
        One of the levels of the module `logging`.
    **fields : str or int or float
        Details of the event. Text that comes from clients is escaped.
    """
    _LOGGER.log(level, event, extra={"fields": fields})


def configure(*, json: bool) -> None:
    """Write the node's log to stderr, one line for each event; with `json`, each line is a JSON object."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines() if json else _Lines())
    _LOGGER.addHandler(handler)
    _LOGGER.setLevel(logging.INFO)
    # If the program has configured the root logger as well, it would write each event again.
    _LOGGER.propagate = False


def _time_of(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(
            f"{name}={msgspec.json.encode(value).decode()}" for name, value in getattr(record, "fields", {}).items()
        )
        time = _time_of(record).strftime("%Y-%m-%d %H:%M:%S")
        return f"{time} {record.levelname.lower()} {record.getMessage()} {fields}".rstrip()


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time_of(record).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        return msgspec.json.encode(line).decode()
