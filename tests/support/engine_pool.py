"""Engines that tests share, because each takes half a minute to start and hundreds of megabytes."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from msgspec import convert
from tests.support.checkpoints import VOCAB, Family, make_checkpoint
from tests.support.cold import ColdHost, Request
from tests.support.vllm_server import (
    PROMPTS,
    RESHARD_FLAG,
    EngineSpec,
    Fingerprint,
    VllmServer,
    vllm_server,
)

MAX_ALIVE = 2

A = 1
"""Seed of the weights that a shared engine starts with."""
B = 2
"""Seed of the other weights."""


@dataclass(slots=True)
class EnginePool:
    """Starts engines on demand, keeps the two last used ones, and ends all at exit.

    A shared engine serves whatever the test before left in it: a test publishes the weights that
    it needs first. A test that breaks its engine takes one of its own.

    Attributes:
        folder: where checkpoints and logs go.
    """

    folder: Path
    _alive: OrderedDict[EngineSpec, tuple[VllmServer, ExitStack]] = field(
        default_factory=OrderedDict
    )
    _fingerprints: dict[EngineSpec, Fingerprint] = field(default_factory=dict)
    _cold_hosts: dict[tuple[tuple[str, str], ...], ColdHost] = field(default_factory=dict)

    def checkpoint(self, family: Family, seed: int, *, vocab: int = VOCAB) -> Path:
        """The fp32 checkpoint of a family's weights number `seed`, made once."""
        folder = self.folder / f"{family}-{vocab}-{seed}"
        return (
            folder if folder.exists() else make_checkpoint(folder, family, seed=seed, vocab=vocab)
        )

    def spec(
        self,
        family: Family,
        tensor_parallel: int,
        *,
        seed: int = A,
        vocab: int = VOCAB,
        flags: tuple[str, ...] = RESHARD_FLAG,
        env: tuple[tuple[str, str], ...] = (),
    ) -> EngineSpec:
        """The description of a tiny engine of a family, started on the weights number `seed`."""
        model = self.checkpoint(family, seed, vocab=vocab)
        return EngineSpec(model, tensor_parallel, flags=flags, env=env)

    def shared(self, spec: EngineSpec) -> VllmServer:
        """The shared engine of this description; its weights are the last test's."""
        server = self._living(spec)
        if server is None:
            self._make_room()
            stack = ExitStack()
            server = stack.enter_context(vllm_server(spec, self.folder / "logs"))
            self._alive[spec] = (server, stack)
        self._alive.move_to_end(spec)
        return server

    def cold_fingerprint(self, spec: EngineSpec) -> Fingerprint:
        """What an engine of this description says when it has just loaded its checkpoint.

        Costs a start of its own, unless a shared engine was started on that checkpoint before.
        """
        cold = _cold(spec)
        if cold not in self._fingerprints:
            if cold.env not in self._cold_hosts:
                log = self.folder / f"cold-{len(self._cold_hosts)}.log"
                self._cold_hosts[cold.env] = ColdHost(dict(cold.env), log)
            request = Request(str(cold.model), cold.tensor_parallel, cold.dtype, PROMPTS)
            said = self._cold_hosts[cold.env].load(request)
            self._fingerprints[cold] = Fingerprint(
                checksums=convert(said["checksums"], dict[str, str]),
                tokens=convert(said["tokens"], tuple[tuple[int, ...], ...]),
                log_probabilities=convert(said["log_probabilities"], tuple[tuple[float, ...], ...]),
            )
        return self._fingerprints[cold]

    @contextmanager
    def own(self, spec: EngineSpec) -> Iterator[VllmServer]:
        """An engine for one test alone, which may break it."""
        self._make_room()
        with vllm_server(spec, self.folder / "logs") as server:
            yield server

    def close(self) -> None:
        """End every engine."""
        while self._alive:
            self._end(next(iter(self._alive)))
        for host in self._cold_hosts.values():
            host.close()

    def _living(self, spec: EngineSpec) -> VllmServer | None:
        """The running engine of a description; one that a test has killed is put away."""
        if spec not in self._alive:
            return None
        server, _ = self._alive[spec]
        if server.tree.process.poll() is None:
            return server
        self._end(spec)
        return None

    def _make_room(self) -> None:
        while len(self._alive) >= MAX_ALIVE:
            self._end(next(iter(self._alive)))

    def _end(self, spec: EngineSpec) -> None:
        _, stack = self._alive.pop(spec)
        stack.close()


def _cold(spec: EngineSpec) -> EngineSpec:
    """The same engine without reshard: a cold load does not depend on it."""
    return replace(spec, flags=())
