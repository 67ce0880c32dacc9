"""Cold engines: a checkpoint loaded by vLLM alone, the judge of every refit.

One process imports vLLM once and then loads engine after engine, which takes seconds each, where a
server takes half a minute. reshard has no part in it: `VLLM_PLUGINS` names no plugin of ours.

Run as a program it answers requests, one JSON object a line.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from typing import IO, Any

_ROOT = Path(__file__).parents[2]
_MARK = "cold engine: "
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_PLUGINS": "none",
}


@dataclass(frozen=True, slots=True)
class Request:
    """Which engine to load, and what to ask it.

    Attributes:
        model: folder of the checkpoint.
        tensor_parallel: engine ranks.
        dtype: of the weights as the engine holds them.
        prompts: token ids.
        options: further arguments of vLLM's `LLM`, by name.
    """

    model: str
    tensor_parallel: int
    dtype: str
    prompts: tuple[tuple[int, ...], ...]
    options: Mapping[str, object] = field(default_factory=dict)


class ColdHost:
    """A process that loads cold engines for the tests of one environment.

    `program` may be another module that answers requests in the same way.
    """

    def __init__(
        self, env: Mapping[str, str], log: Path, program: str = "tests.support.cold"
    ) -> None:
        self._log: IO[bytes] = log.open("ab")
        self._process = Popen(
            [sys.executable, "-m", program],
            cwd=_ROOT,
            env={**os.environ, **_ENVIRONMENT, **env},
            stdin=PIPE,
            stdout=PIPE,
            stderr=self._log,
            start_new_session=True,
        )

    def load(self, request: Request) -> dict[str, object]:
        """Load an engine, ask it, end it.

        Raises:
            AssertionError: vLLM cannot load it, or the process ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(request)).encode() + b"\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(_MARK.encode()):
                said: dict[str, object] = json.loads(line.decode().removeprefix(_MARK))
                assert "error" not in said, f"{said['error']}; see {self._log.name}"
                return said
        raise AssertionError(f"the cold engine's process ended; see {self._log.name}")

    def close(self) -> None:
        """End the process and its ranks."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except TimeoutExpired:
            pass
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, 9)
                self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._log.close()


def main() -> None:
    """Answer requests until standard input ends."""
    for line in sys.stdin:
        given = json.loads(line)
        given["prompts"] = tuple(map(tuple, given["prompts"]))
        try:
            answer(_load(Request(**given)))
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})


def answer(said: Mapping[str, object]) -> None:
    """Print the answer to a request."""
    print(_MARK + json.dumps(said), flush=True)


def start(request: Request, **more: object) -> Any:
    """The `vllm.LLM` of a request."""
    from vllm import LLM

    options: dict[str, Any] = {
        "tensor_parallel_size": request.tensor_parallel,
        "distributed_executor_backend": "mp" if request.tensor_parallel > 1 else None,
        "dtype": request.dtype,
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 16,
        "generation_config": "vllm",
    }
    return LLM(request.model, **{**options, **request.options, **more})


def ask(llm: Any, prompts: tuple[tuple[int, ...], ...]) -> dict[str, object]:
    """Checksums of all parameters, greedy tokens, log-probabilities of the prompts."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    scored = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    checksums: dict[str, str] = {}
    for of_rank in llm.collective_rpc("compute_weight_checksums"):
        checksums |= of_rank
    tokens, log_probabilities = [], []
    for prompt in prompts:
        (said,) = llm.generate([{"prompt_token_ids": list(prompt)}], greedy, use_tqdm=False)
        tokens.append(list(said.outputs[0].token_ids))
    for prompt in prompts:
        (said,) = llm.generate([{"prompt_token_ids": list(prompt)}], scored, use_tqdm=False)
        entries = zip(said.prompt_logprobs[1:], prompt[1:], strict=True)
        log_probabilities.append([entry[token].logprob for entry, token in entries])
    return {"checksums": checksums, "tokens": tokens, "log_probabilities": log_probabilities}


def end(llm: Any) -> None:
    """Shut the engine down, its ranks included."""
    llm.llm_engine.engine_core.shutdown()


def _load(request: Request) -> dict[str, object]:
    llm = start(request)
    try:
        return ask(llm, request.prompts)
    finally:
        end(llm)


if __name__ == "__main__":
    main()
