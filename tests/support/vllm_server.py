"""A real vLLM server on this machine's CPU, for tests.

Two ranks share two cores, the model is tiny, and nothing is downloaded. An engine takes half a
minute to start (imports), so tests share them: see `tests/engine/conftest.py`.
"""

import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from tests.support.processes import Started, started, wait_until

START_SECONDS = 240.0
CALL_SECONDS = 120.0
PORT_ATTEMPTS = 3
PORT_TAKEN = "address already in use"

CPU_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_COLOR": "0",
    "VLLM_SERVER_DEV_MODE": "1",  # vLLM's RL routes: /pause, /update_weights, /weight_checker...
}

RESHARD_FLAG = ("--weight-transfer-config", '{"backend": "reshard"}')
"""The one flag that a user gives."""
EXTENSION_FLAG = ("--worker-extension-cls", "reshard_vllm.WorkerExtension")
"""Its alternative, for setups that drive `collective_rpc` themselves."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What to start.

    Attributes:
        model: folder of the checkpoint to serve.
        tensor_parallel: engine ranks.
        dtype: of the weights as the engine holds them.
        flags: how reshard is switched on: `RESHARD_FLAG`, `EXTENSION_FLAG`, or nothing.
        arguments: more of vLLM's arguments.
        env: changes to the environment, as pairs.
        apart: keep it to one CPU, in a session of its own, and leave the other one to the trainer;
            else it shares all with the trainer, process by process.
    """

    model: Path
    tensor_parallel: int = 1
    dtype: str = "bfloat16"
    flags: tuple[str, ...] = RESHARD_FLAG
    arguments: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    apart: bool = True

    def command(self, port: int) -> list[str]:
        """The command line of the server."""
        return [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self.model), "--served-model-name", "policy"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--tensor-parallel-size", str(self.tensor_parallel)),
            "--enforce-eager",
            *("--dtype", self.dtype, "--max-model-len", "256", "--max-num-seqs", "16"),
            *("--generation-config", "vllm", "--enable-scale-out", "--disable-uvicorn-access-log"),
            *self.flags,
            *self.arguments,
        ]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Everything by which two engines at the same weights must be equal, bit for bit.

    Checksums alone are blind where vLLM packs weights into opaque handlers (on CPUs with AMX or
    AVX-512 BF16) or into other storage: the prompt's log-probabilities depend on every weight.

    Attributes:
        checksums: vLLM's own SHA-256 by rank and parameter.
        tokens: greedy continuations.
        log_probabilities: of every prompt token but the first, per prompt.
    """

    checksums: dict[str, str]
    tokens: tuple[tuple[int, ...], ...]
    log_probabilities: tuple[tuple[float, ...], ...]


PROMPTS = (
    tuple(range(10, 42)),
    (7, 99, 3, 54, 200, 18, 18, 18, 249, 0, 61),
    tuple((37 * n + 11) % 250 for n in range(96)),
)
"""Prompts of a fingerprint, all ids below `UNEVEN_VOCAB`."""


@dataclass(frozen=True, slots=True)
class VllmServer:
    """A running server.

    Attributes:
        url: what `reshard_trainer.attach(engines=[...])` takes.
        spec: what was started.
        tree: its processes.
    """

    url: str
    spec: EngineSpec
    tree: Started
    _client: httpx.Client = field(repr=False)

    def get(self, route: str) -> dict[str, object]:
        """GET a route; fails unless it answers 200 with a JSON object."""
        return _json(self._client.get(route))

    def post(self, route: str, body: Mapping[str, object] | None = None) -> dict[str, object]:
        """POST to a route; fails unless it answers 200 with a JSON object."""
        return _json(self._client.post(route, json=body or {}))

    def try_post(self, route: str, body: Mapping[str, object] | None = None) -> httpx.Response:
        """POST to a route that may fail."""
        return self._client.post(route, json=body or {})

    def rpc(self, method: str, *arguments: str) -> list[object]:
        """Call a method of every worker; the ranks' answers in order."""
        answer = self.post("/collective_rpc", {"method": method, "args": list(arguments)})
        results = answer["results"]
        assert isinstance(results, list)
        return results

    def weight_version(self) -> str:
        """The version label of the weights that the engine serves."""
        return str(self.get("/weight_info")["weight_version"])

    def checksums(self) -> dict[str, str]:
        """vLLM's SHA-256 of each parameter and rank."""
        answer = self.post("/weight_checker", {"action": "checksum"})["checksums"]
        assert isinstance(answer, dict)
        return answer

    def complete(self, prompt: Sequence[int], *, max_tokens: int = 16) -> tuple[int, ...]:
        """Greedy continuation of a prompt, as token ids; uses the prefix cache."""
        return tuple(_int_list(self._completion(prompt, max_tokens=max_tokens)["token_ids"]))

    def prompt_log_probabilities(self, prompt: Sequence[int]) -> tuple[float, ...]:
        """Log-probability of each prompt token after the first; never from the prefix cache."""
        choice = self._completion(prompt, max_tokens=1, prompt_logprobs=0)
        entries = choice["prompt_logprobs"]
        assert isinstance(entries, list)
        pairs = zip(entries[1:], prompt[1:], strict=True)
        return tuple(float(entry[str(token)]["logprob"]) for entry, token in pairs)

    def version_spans(self, prompt: Sequence[int], *, max_tokens: int = 8) -> list[object]:
        """Which weight version made which tokens of a greedy continuation."""
        sampling = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
        body = {"model": "policy", "token_ids": list(prompt), "sampling_params": sampling}
        spans = _first_choice(self.post("/inference/v1/generate", body))["weight_versions"]
        assert isinstance(spans, list)
        return spans

    def fingerprint(self) -> Fingerprint:
        """What this engine holds and says, to compare with another engine's."""
        return Fingerprint(
            checksums=self.checksums(),
            tokens=tuple(self.complete(prompt) for prompt in PROMPTS),
            log_probabilities=tuple(self.prompt_log_probabilities(prompt) for prompt in PROMPTS),
        )

    def _completion(self, prompt: Sequence[int], **settings: object) -> dict[str, object]:
        body = {
            "model": "policy",
            "prompt": list(prompt),
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            **settings,
        }
        return _first_choice(self.post("/v1/completions", body))


@contextmanager
def vllm_server(spec: EngineSpec, logs: Path) -> Iterator[VllmServer]:
    """Start a server, wait until it is healthy, and end its whole process tree at exit.

    Args:
        spec: what to start.
        logs: folder of the log file; the log's end is in the error of a failed start.

    Raises:
        AssertionError: if it does not start within its deadline.
    """
    logs.mkdir(parents=True, exist_ok=True)
    for attempt in range(PORT_ATTEMPTS):
        port = _free_port()
        log = logs / f"vllm-{port}-{time.time_ns()}.log"
        environment = CPU_ENVIRONMENT | dict(spec.env)
        with (
            _without_segments(log),
            started(spec.command(port), log=log, env=environment, own_session=spec.apart) as tree,
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=CALL_SECONDS) as client,
        ):
            healthy = _wait_for_health(tree, client)
            if healthy:
                if spec.apart:
                    _keep_to_one_cpu(tree)
                yield VllmServer(f"http://127.0.0.1:{port}", spec, tree, client)
                return
            taken = PORT_TAKEN in log.read_text(errors="replace").lower()
            if not taken or attempt == PORT_ATTEMPTS - 1:
                raise AssertionError(f"vLLM did not start ({log}):\n{tree.log_tail()}")


@contextmanager
def _without_segments(log: Path) -> Iterator[None]:
    """Remove at exit the shared memory that vLLM's CPU ranks leave behind, even at a clean end."""
    try:
        yield
    finally:
        for name in set(re.findall(r"vllm_dist_\w+", log.read_text(errors="replace"))):
            for segment in Path("/dev/shm").glob(f"{name}*"):
                segment.unlink(missing_ok=True)


def _keep_to_one_cpu(tree: Started) -> None:
    """Leave the other one to the trainer.

    vLLM's ranks poll for a second after each call. On a machine of two CPUs they leave trainer
    ranks less than a hundredth of them while requests come one after another: minutes pass.
    """
    first = min(os.sched_getaffinity(0))
    for thread in (task for pid in tree.pids() for task in Path(f"/proc/{pid}/task").glob("*")):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), {first})


def _wait_for_health(tree: Started, client: httpx.Client) -> bool:
    """Whether the server became healthy before its deadline, and before it ended."""

    def settled() -> bool:
        return tree.process.poll() is not None or _answers(client)

    return wait_until(settled, START_SECONDS, every=0.25) and tree.process.poll() is None


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def _free_port() -> int:
    """A port that was free a moment ago; vLLM takes only a given one, so a start may be retried."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _json(response: httpx.Response) -> dict[str, object]:
    assert response.status_code == 200, f"{response.request.url}: {response.text}"
    answer = response.json()
    assert isinstance(answer, dict), answer
    return answer


def _first_choice(answer: dict[str, object]) -> dict[str, object]:
    choices = answer["choices"]
    assert isinstance(choices, list)
    choice = choices[0]
    assert isinstance(choice, dict)
    return choice


def _int_list(value: object) -> list[int]:
    assert isinstance(value, list)
    return [int(item) for item in value]
