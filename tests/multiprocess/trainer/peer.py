"""Test double of a vLLM server: its RL routes, its rules about updates, real receivers behind.

One process a rank holds the real `reshard_vllm.receiver.Receiver` over a `PlainTarget`. The HTTP
server is a thread of the test. What would put a real engine's worker replies out of step (vLLM
raises in its worker) is counted in `violations` and answered with 500, as vLLM does.
"""

import json
import pickle
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from os import kill
from types import TracebackType
from typing import Literal, Self
from urllib.parse import parse_qs, urlsplit

import torch
from tests.multiprocess.trainer.plain_target import Phase, PlainTarget
from tests.multiprocess.trainer.processes import FORKS
from tests.support.networks import enter_network

from reshard.ids import EngineRank

Json = dict[str, object]
GATE_SECONDS = 30.0


@dataclass(frozen=True)
class PeerModel:
    """What the engine serves.

    Attributes:
        shapes: of its tensors, by canonical name.
        cuts: the dim that tensor parallelism cuts, by name.
        dtype: of the live tensors.
        ignored: names that its loader skips.
    """

    shapes: Mapping[str, tuple[int, ...]]
    cuts: Mapping[str, int] = field(default_factory=dict)
    dtype: Literal["float32", "bfloat16"] = "float32"
    ignored: frozenset[str] = frozenset()


def _serve_rank(pipe: Connection, rank: int, size: int, model: PeerModel, network: str) -> None:
    import logging

    if network:
        enter_network(network)
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    serve(
        pipe,
        PlainTarget(EngineRank(rank), size, model.shapes, model.cuts, model.dtype, model.ignored),
    )


def serve(pipe: Connection, target: PlainTarget) -> None:
    """Answer one rank's calls; never returns."""
    from reshard_vllm.receiver import Receiver

    receiver = Receiver(target)
    while True:
        method, argument = pickle.loads(pipe.recv_bytes())
        answer: object = None
        match method:
            case "connect" | "receive" | "commit":
                getattr(receiver, method)(argument)
            case "update_active":
                receiver.update_active = argument
            case "status":
                answer = receiver.status({})
            case "close":
                receiver.close()
            case "break":
                target.broken = argument
            case "break_once":
                target.broken_once = argument
            case "sleep":
                target.asleep = argument
            case "versions":
                target.versions = argument
            case "read":
                answer = target.live
            case "call":
                function, *arguments = argument
                answer = function(*arguments)
        pipe.send_bytes(pickle.dumps(answer))


class PeerEngine:
    """A server of `size` ranks.

    Attributes:
        url: of the server.
        calls: paths of all control calls, in order.
        violations: calls at which a vLLM worker would have raised.
        answers: by path: (status, body) to answer with instead of acting.
        fences: whether it was started with the middleware that refuses requests.
        fence: why it does.
        gates: by path: calls wait here, before they act, until it is open.
    """

    def __init__(
        self,
        model: PeerModel,
        size: int = 2,
        *,
        backend: str = "reshard",
        extension: str = "",
        dev_mode: bool = True,
        network: str = "",
    ) -> None:
        """Start the ranks and the server.

        Args:
            model: what it serves.
            size: number of ranks.
            backend, extension: of the server's flags.
            dev_mode: whether the server has vLLM's routes for development.
            network: namespace in which the ranks run; the server stays in the test's.
        """
        self.model = model
        self.size = size
        self.calls: list[str] = []
        self.violations: list[str] = []
        self.answers: dict[str, tuple[int, Json]] = {}
        self.gates: dict[str, threading.Event] = {}
        self.weight_version = "default"
        self.fences = False
        self.fence = ""
        self.paused = False
        self.update_active = False
        self.resets: list[str] = []
        self.reset_refusals = 0
        self._config: Json = {
            "weight_transfer_config": {"backend": backend} if backend else None,
            "parallel_config": {"worker_extension_cls": extension},
        }
        self._dev_mode = dev_mode
        self._network = network
        self._lock = threading.Lock()
        self._pipes: dict[int, Connection] = {}
        self._processes: dict[int, BaseProcess] = {}
        for rank in range(size):
            self._start_rank(rank)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @property
    def name(self) -> str:
        return self.url.removeprefix("http://")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        for process in self._processes.values():
            process.kill()
            process.join()

    def _start_rank(self, rank: int) -> None:
        here, there = FORKS.Pipe()
        process = self._make_process(there, rank)
        process.start()
        there.close()
        self._pipes[rank], self._processes[rank] = here, process

    def _make_process(self, pipe: Connection, rank: int) -> BaseProcess:
        return FORKS.Process(
            target=_serve_rank,
            args=(pipe, rank, self.size, self.model, self._network),
            daemon=True,
        )

    def restart_rank(self, rank: int) -> None:
        """A new process in the place of one that was killed."""
        self._processes[rank].join()
        self._start_rank(rank)

    def kill_rank(self, rank: int) -> None:
        """As a crash: kill -9."""
        self._signal(rank, signal.SIGKILL)

    def stop_rank(self, rank: int) -> None:
        """As a hang: SIGSTOP."""
        self._signal(rank, signal.SIGSTOP)

    def continue_rank(self, rank: int) -> None:
        self._signal(rank, signal.SIGCONT)

    def break_rank(self, rank: int, *phases: Phase) -> None:
        """Have a rank raise in these phases from now on, and in no other."""
        self._ask(rank, "break", set(phases))

    def break_rank_once(self, rank: int, phase: Phase) -> None:
        """Have a rank raise the next time that it comes to this phase."""
        self._ask(rank, "break_once", {phase})

    def tell_rank(self, rank: int, what: Literal["sleep", "versions"], value: object) -> None:
        self._ask(rank, what, value)

    def call_rank(self, rank: int, function: Callable[..., object], *arguments: object) -> object:
        """Call a function in a rank's process."""
        return self._ask(rank, "call", (function, *arguments))

    def status(self, rank: int) -> Json:
        answer = self._ask(rank, "status", None)
        assert isinstance(answer, dict)
        return answer

    def weights(self) -> dict[str, torch.Tensor]:
        """The whole tensors, put together from all ranks' live ones; -1 where nobody has any."""
        whole = {n: torch.full(shape, -1.0) for n, shape in self.model.shapes.items()}
        for rank in range(self.size):
            live = self._ask(rank, "read", None)
            assert isinstance(live, dict)
            target = PlainTarget(EngineRank(rank), self.size, self.model.shapes, self.model.cuts)
            for name, tensor in live.items():
                region = target.region(name)
                ends = zip(region.offset, region.end, strict=True)
                whole[name][tuple(slice(a, b) for a, b in ends)] = tensor.float()
        return whole

    def _signal(self, rank: int, number: signal.Signals) -> None:
        pid = self._processes[rank].pid
        assert pid is not None
        kill(pid, number)

    def _ask(self, rank: int, method: str, argument: object) -> object:
        with self._lock:
            self._pipes[rank].send_bytes(pickle.dumps((method, argument)))
            return pickle.loads(self._pipes[rank].recv_bytes())

    def _collective(self, method: str, argument: object) -> list[object]:
        """One call to all ranks at once; a rank that died is an error, as in vLLM."""
        message = pickle.dumps((method, argument))
        with self._lock:
            for pipe in self._pipes.values():
                pipe.send_bytes(message)
            return [pickle.loads(pipe.recv_bytes()) for pipe in self._pipes.values()]

    def handle(
        self, path: str, query: dict[str, list[str]], body: Json
    ) -> tuple[int, Json | bytes]:
        """What a vLLM server does on one of its routes; status 0: it hangs up."""
        self.calls.append(path)
        if path in self.gates and not self.gates[path].wait(GATE_SECONDS):
            return 500, {"error": {"message": f"the gate of {path} stayed shut"}}
        if path in self.answers:
            return self.answers[path]
        if path == "/health":
            return 200, {}
        if path == "/reshard/fence":
            if not self.fences:
                return 404, {"detail": "Not Found"}
            self.fence = str(body["reason"])
            return 200, {"reason": self.fence}
        if not self._dev_mode:
            return 404, {"detail": "Not Found"}
        try:
            return 200, self._act(path, query, body)
        except (EOFError, OSError, RuntimeError) as error:
            return 500, {"error": {"message": f"{type(error).__name__}: {error}"}}

    def _act(self, path: str, query: dict[str, list[str]], body: Json) -> Json:
        match path:
            case "/server_info":
                return {"vllm_config": self._config}
            case "/get_world_size":
                return {"world_size": self.size}
            case "/is_paused":
                return {"is_paused": self.paused}
            case "/weight_info":
                return {"weight_version": self.weight_version}
            case "/pause":
                modes = (["keep"], ["abort"]) if self.fence else (["keep"],)
                assert query["mode"] in modes, query
                assert query["clear_cache"] == ["false"], query
                self.paused = True
            case "/resume":
                self.paused = False
            case "/reset_prefix_cache":
                self.resets.append(self.weight_version)
                if self.reset_refusals:
                    self.reset_refusals -= 1
                    return {"success": False}
                return {"success": query == {"reset_running_requests": ["true"]}}
            case "/update_weight_version":
                self.weight_version = str(body["new_version"])
            case "/collective_rpc":
                method = str(body["method"]).removeprefix("refit_")
                kwargs = body.get("kwargs", {})
                assert isinstance(kwargs, dict)
                return {"results": self._collective(method, kwargs.get("message"))}
            case _:
                self._transfer_route(path, body)
        return {"message": "done"}

    def _transfer_route(self, path: str, body: Json) -> None:
        config = self._config["weight_transfer_config"]
        if config != {"backend": "reshard"}:
            self._violate(f"{path} without weight_transfer_config")
        match path:
            case "/init_weight_transfer_engine":
                init = body["init_info"]
                assert isinstance(init, dict)
                self._collective("connect", init["session"])
            case "/start_weight_update":
                if self.update_active:
                    self._violate("start while a weight update is active")
                self._set_active(True)
            case "/update_weights":
                if not self.update_active:
                    self._violate("update without start")
                update = body["update_info"]
                assert isinstance(update, dict)
                self._collective(update["step"], update["message"])
            case "/finish_weight_update":
                if not self.update_active:
                    self._violate("finish without start")
                self._set_active(False)
                if body.get("weight_version") is not None:
                    self.weight_version = str(body["weight_version"])
            case "/shutdown_weight_transfer_engine":
                if self.update_active:
                    self._violate("shutdown during a weight update")
                self._collective("close", None)
            case _:
                raise RuntimeError(f"no route {path}")

    def _set_active(self, active: bool) -> None:
        self._collective("update_active", active)
        self.update_active = active

    def _violate(self, what: str) -> None:
        self.violations.append(what)
        raise RuntimeError(what)


def _handler(peer: PeerEngine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Header and body in two packets would wait for each other (Nagle), 40 ms a call.
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._handle()

        def do_POST(self) -> None:
            self._handle()

        def _handle(self) -> None:
            parts = urlsplit(self.path)
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, answer = peer.handle(
                parts.path, parse_qs(parts.query), json.loads(raw) if raw else {}
            )
            if not status:
                self.close_connection = True
                return
            payload = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            with suppress(OSError):
                self.send_response(status)
                self.send_header("Content-Length", str(len(payload)))
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(payload)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
