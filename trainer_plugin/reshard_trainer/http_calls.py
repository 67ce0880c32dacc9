"""One HTTP call to an engine, its errors told apart: not reached, refused, no answer.

Nothing is ever repeated here. Not here: which routes there are (`engines.py`).
"""

from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

import httpx

from reshard.board import Deadline
from reshard.errors import DeadlineExceeded, EngineError

_CONNECT_SECONDS: Final = 10.0
"""Longest wait for a TCP connection: an address that drops packets is told apart soon."""

_SHOWN_CHARACTERS: Final = 2_000


class HttpCalls:
    """Calls to one server.

    Attributes:
        name: the server's host and port, for messages.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        """Prepare; nothing is sent.

        Raises:
            EngineError: `url` is not that of an HTTP server.
        """
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise EngineError(f"engine {url!r} is not a URL such as http://127.0.0.1:8000")
        self.name = parts.netloc.rpartition("@")[2]
        self.host = parts.hostname
        # A proxy taken from the environment would see the run's secret.
        self._client = httpx.Client(
            base_url=f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}",
            headers=dict(headers),
            trust_env=False,
        )

    def call(
        self,
        method: str,
        path: str,
        deadline: Deadline,
        *,
        body: Mapping[str, object] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        """Send one request; the answer, whatever its status.

        Raises:
            EngineError: nothing was sent, or the server went away.
            DeadlineExceeded: no answer in time; what was asked for may still happen.
        """
        left = max(0.001, deadline.remaining())
        timeout = httpx.Timeout(left, connect=min(left, _CONNECT_SECONDS))
        try:
            return self._client.request(method, path, json=body, params=query, timeout=timeout)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise EngineError(
                f"engine {self.name} cannot be reached ({error}); is the server up, and is this "
                "its address?"
            ) from error
        except httpx.TimeoutException as error:
            raise DeadlineExceeded(
                f"engine {self.name} did not answer {path} within {deadline.seconds:g} s; the call "
                "may still take effect, so it is not repeated"
            ) from error
        except httpx.HTTPError as error:
            raise EngineError(
                f"engine {self.name} broke off {path} ({type(error).__name__}: {error}); did the "
                "server die?"
            ) from error

    def ask(
        self,
        method: str,
        path: str,
        deadline: Deadline,
        *,
        body: Mapping[str, object] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> dict[str, object]:
        """Send one request; the answer's JSON object, empty if it has none.

        Raises:
            EngineError: nothing was sent, the server went away, or it answered with an error.
            DeadlineExceeded: no answer in time.
        """
        answer = self.call(method, path, deadline, body=body, query=query)
        if answer.is_error:
            raise EngineError(
                f"engine {self.name} answered {path} with {answer.status_code}: {_reason(answer)}"
            )
        return json_object(answer)

    def close(self) -> None:
        """Drop the connections."""
        self._client.close()


def json_object(answer: httpx.Response) -> dict[str, object]:
    """The answer's JSON object, empty if it has none."""
    try:
        value = answer.json()
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _reason(answer: httpx.Response) -> str:
    """The server's own words."""
    body = json_object(answer)
    error = body.get("error", body.get("detail", answer.text))
    if isinstance(error, dict):
        error = error.get("message", error)
    return str(error)[:_SHOWN_CHARACTERS]
