"""A vLLM server as an engine, over its own RL routes.

Two ways in, the same receiver behind both: the weight-transfer backend `reshard`, and the worker
extension over `/collective_rpc`. Which one a server has is read from its configuration before
anything is asked of its workers: a call that a worker answers with an exception puts vLLM's worker
replies out of step for good (vllm#49972).

Not here: engines in this process (`in_process.py`), the order of calls of a refit.
"""

from collections.abc import Mapping
from typing import Final, Literal, cast

from reshard.board import Deadline
from reshard.engine_control import EngineDescription, Message
from reshard.errors import EngineError
from reshard_trainer.http_calls import HttpCalls, json_object

BACKEND: Final = "reshard"
EXTENSION: Final = "reshard_vllm.WorkerExtension"
_EXTENSIONS: Final = frozenset({EXTENSION, "reshard_vllm.extension.WorkerExtension"})

FENCE_ROUTE: Final = "/reshard/fence"
"""Of `reshard_vllm.FenceMiddleware`."""

FLAG_HELP: Final = (
    f'start it with --weight-transfer-config \'{{"backend": "{BACKEND}"}}\' '
    f"(or with --worker-extension-cls {EXTENSION})"
)

Entry = Literal["backend", "extension"]

InFlight = Literal["keep", "wait", "abort"]
"""What becomes of running requests when the weights change.

`keep`: they are held and go on, their version span is split. `wait`: they end first. `abort`: they
are answered with the tokens so far; `reshard_trainer.rollouts` sends them again behind these.
"""


class HttpEngine:
    """A vLLM server. `EngineControl` says what each call promises.

    Attributes:
        name: host and port.
        host: host alone, to find the way there.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        in_flight: InFlight = "keep",
    ) -> None:
        """Prepare; nothing is sent.

        Args:
            url: such as `http://127.0.0.1:8000`.
            headers: sent with every call, an API key for instance.
            in_flight: what becomes of running requests when the weights change.

        Raises:
            EngineError: not a URL.
        """
        self._http = HttpCalls(url, headers or {})
        self.name = self._http.name
        self.host = self._http.host
        self._entry: Entry | None = None
        self._in_flight = in_flight

    def __repr__(self) -> str:
        return f"HttpEngine({self.name!r})"

    def describe(self, deadline: Deadline) -> EngineDescription:
        """Check the server's configuration; reaches no worker."""
        self._entry = None
        health = self._http.call("GET", "/health", deadline)
        if health.is_error:
            raise EngineError(
                f"engine {self.name} is not healthy (/health answers {health.status_code}); "
                "look into its log, and restart it"
            )
        config = self._configuration(deadline)
        self._entry = entry_of(
            self.name,
            backend=_text(config, "weight_transfer_config", "backend"),
            extension=_text(config, "parallel_config", "worker_extension_cls"),
        )
        ranks = self._http.ask("GET", "/get_world_size", deadline).get("world_size")
        paused = self._http.ask("GET", "/is_paused", deadline).get("is_paused")
        return EngineDescription(
            ranks=int(str(ranks)),
            weight_version=self.weight_version(deadline),
            paused=paused is True,
        )

    def connect(self, message: Message, deadline: Deadline) -> None:
        """Have every rank join a session."""
        if self._through_backend():
            self._post(
                "/init_weight_transfer_engine", deadline, {"init_info": {"session": message}}
            )
        else:
            self._rpc("refit_connect", message, deadline)

    def begin(self, deadline: Deadline) -> None:
        """Open vLLM's update session; with the extension alone there is none."""
        if self._through_backend():
            self._post("/start_weight_update", deadline)

    def receive(self, message: Message, deadline: Deadline) -> None:
        """Have every rank start to receive."""
        self._step("receive", message, deadline)

    def commit(self, message: Message, deadline: Deadline) -> None:
        """Have every rank make the received version live."""
        self._step("commit", message, deadline)

    def finish(self, version: str | None, deadline: Deadline) -> None:
        """Close vLLM's update session, with the version if there is one."""
        if self._through_backend():
            body = {} if version is None else {"weight_version": version}
            self._post("/finish_weight_update", deadline, body)
        elif version is not None:
            self._post("/update_weight_version", deadline, {"new_version": version})

    def pause(self, deadline: Deadline) -> None:
        """Run nothing; what becomes of KV blocks is a setting of the refit."""
        query = {"mode": self._in_flight, "clear_cache": "false"}
        self._http.ask("POST", "/pause", deadline, query=query)

    def resume(self, deadline: Deadline) -> None:
        """Let requests run again."""
        self._http.ask("POST", "/resume", deadline)

    def reset_prefix_cache(self, deadline: Deadline) -> bool:
        """Drop all KV blocks; held requests recompute theirs with the new weights."""
        # Without this vLLM answers 200 and "success": false while any request is held.
        query = {"reset_running_requests": "true"}
        answer = self._http.ask("POST", "/reset_prefix_cache", deadline, query=query)
        return answer.get("success") is True

    def weight_version(self, deadline: Deadline) -> str:
        """The label of the engine's outputs."""
        return str(self._http.ask("GET", "/weight_info", deadline).get("weight_version"))

    def release(self, deadline: Deadline) -> None:
        """Have every rank leave its session."""
        if self._through_backend():
            self._post("/shutdown_weight_transfer_engine", deadline)
        else:
            self._post("/collective_rpc", deadline, {"method": "refit_close"})

    def fence(self, reason: str, deadline: Deadline) -> bool:
        """Refuse requests through the server's middleware, if it was started with it."""
        answer = self._http.call("POST", FENCE_ROUTE, deadline, body={"reason": reason})
        if answer.status_code in (404, 405):
            return False
        if answer.is_error:
            raise EngineError(
                f"engine {self.name} answered {FENCE_ROUTE} with {answer.status_code}"
            )
        if reason:
            # Held requests would wait for a refit that succeeds: end them.
            query = {"mode": "abort", "clear_cache": "false"}
            self._http.ask("POST", "/pause", deadline, query=query)
        return True

    def close(self) -> None:
        """Drop the connections."""
        self._http.close()

    def _configuration(self, deadline: Deadline) -> dict[str, object]:
        answer = self._http.call("GET", "/server_info", deadline, query={"config_format": "json"})
        if answer.status_code == 404:
            raise EngineError(
                f"engine {self.name} has no RL routes (/server_info answers 404); start the "
                "server with VLLM_SERVER_DEV_MODE=1 in its environment"
            )
        if answer.is_error:
            raise EngineError(
                f"engine {self.name} answered /server_info with {answer.status_code}"
                + ("; pass its API key in `headers`" if answer.status_code in (401, 403) else "")
            )
        config = json_object(answer).get("vllm_config")
        if not isinstance(config, dict):
            raise EngineError(
                f"engine {self.name} does not tell its configuration (/server_info has no "
                "vllm_config object); reshard needs vLLM 0.32 or newer"
            )
        return cast(dict[str, object], config)

    def _through_backend(self) -> bool:
        if self._entry is None:
            raise EngineError(f"engine {self.name} was not described yet; call describe first")
        return self._entry == "backend"

    def _step(self, step: Literal["receive", "commit"], message: Message, at: Deadline) -> None:
        if self._through_backend():
            self._post("/update_weights", at, {"update_info": {"step": step, "message": message}})
        else:
            self._rpc(f"refit_{step}", message, at)

    def _rpc(self, method: str, message: Message, deadline: Deadline) -> None:
        # Never with a timeout of vLLM's own: when it expires, late replies stay in its queues.
        body = {"method": method, "kwargs": {"message": message}}
        self._post("/collective_rpc", deadline, body)

    def _post(self, path: str, deadline: Deadline, body: Message | None = None) -> None:
        self._http.ask("POST", path, deadline, body=body)


def entry_of(name: str, *, backend: str, extension: str) -> Entry:
    """Through which of vLLM's plugin points the receiver is reached.

    Raises:
        EngineError: through none.
    """
    if backend == BACKEND:
        return "backend"
    if extension in _EXTENSIONS:
        return "extension"
    if backend:
        raise EngineError(
            f"engine {name} runs with the weight-transfer backend {backend!r}; {FLAG_HELP}"
        )
    raise EngineError(f"engine {name} was started without reshard's flag; {FLAG_HELP}")


def _text(config: Mapping[str, object], section: str, key: str) -> str:
    held = config.get(section)
    return str(held.get(key) or "") if isinstance(held, dict) else ""
