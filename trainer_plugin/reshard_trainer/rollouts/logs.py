"""Structured logs: one JSON object a line, with the run and the policy version.

Standard library logging with another formatter; nothing is logged differently because of it.
"""

import json
import logging
import time
from collections.abc import Callable


class JsonLines(logging.Formatter):
    """Formats a record as `{"time", "level", "logger", "run", "version", "message", ...}`."""

    def __init__(self, run_id: str, version: Callable[[], int]) -> None:
        """Format for a run.

        Args:
            run_id: named in every line.
            version: the trainer's version when a line is written.
        """
        super().__init__()
        self._run_id = run_id
        self._version = version

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "run": self._run_id,
            "version": self._version(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
