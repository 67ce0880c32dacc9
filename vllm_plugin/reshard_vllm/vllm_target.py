"""A vLLM worker as the receiver's target.

The layout is proven on first use, before any refit has touched the parameters, and the proof is
kept for the life of the worker: later sessions with other trainers build on it.
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import torch
import vllm
from vllm.config import VllmConfig

from reshard.errors import RecordingError
from reshard.ids import EngineRank
from reshard.session import Install, TensorSpec
from reshard_vllm.install import checkpoint
from reshard_vllm.install.evidence import Proof
from reshard_vllm.install.fitting import fit, renamed
from reshard_vllm.install.installer import VllmInstaller
from reshard_vllm.install.proof import prove
from reshard_vllm.mismatch import mismatches
from reshard_vllm.recording.loader_map import LoaderMap, layout_of


class VllmTarget:
    """The rank of a vLLM engine whose worker holds `model`."""

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        self._config = vllm_config
        self._device = device
        self._model = model
        self._proof: Proof | None = None
        self._installers: dict[tuple[tuple[TensorSpec, ...], Install], VllmInstaller] = {}

    @property
    def rank(self) -> EngineRank:
        """This rank within its engine, data-parallel replicas included."""
        parallel = self._config.parallel_config
        return EngineRank(parallel.data_parallel_index * parallel.world_size + parallel.rank)

    @property
    def size(self) -> int:
        """Number of the engine's ranks as this worker counts them.

        Data-parallel replicas of a dense model are told nothing of each other but their own number
        (`reconfigure_for_independent_dp_rank`): each counts its own ranks.
        """
        return int(self._config.parallel_config.world_size_across_dp)

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return self._device

    @property
    def model_name(self) -> str:
        """What the engine serves, for messages."""
        return str(self._config.model_config.model)

    @property
    def versions(self) -> Mapping[str, str]:
        """Of the software that both sides should agree on."""
        return {
            "reshard": _version("reshard"),
            "torch": str(torch.__version__),
            "vllm": vllm.__version__,
        }

    def state(self) -> tuple[Literal["ready", "asleep"], str]:
        """Whether weights can be received now."""
        return "ready", ""

    def installer(self, specs: Sequence[TensorSpec], install: Install) -> VllmInstaller:
        """The installer for the trainer's tensors; recorded once per set of tensors.

        Raises:
            RecordingError: the loader cannot be recorded, or its layout cannot be proven.
        """
        key = (tuple(specs), install)
        if key not in self._installers:
            if self._proof is None:
                self._proof = prove(self._model, self._config)
            fitted = fit(key[0], {*self._proof.order}, self._proof.vocabulary)
            recorded = renamed(self._record(self._proof.in_order(fitted.specs)), fitted)
            # One at a time: an installer may hold a shadow of the whole shard.
            self._installers.clear()
            installer = VllmInstaller(
                self._model, self._config, recorded, self._proof, key[0], install=install
            )
            installer.notes += fitted.notes
            self._installers[key] = installer
        return self._installers[key]

    def _record(self, specs: Sequence[TensorSpec]) -> LoaderMap:
        """The loader's map for `specs`; where it rejects them, all that sets them apart."""
        try:
            return layout_of(self._config, specs)
        except RecordingError as error:
            if not checkpoint.can_read(self._config):
                raise
            loaded = checkpoint.specs(self._config, self._model)
            # A loader stops at the first tensor that it does not take.
            faults = mismatches(specs, loaded)
            raise RecordingError(str(error), [str(error), *faults]) from error


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "source"
