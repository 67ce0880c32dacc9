"""`--worker-extension-cls reshard_vllm.WorkerExtension`: the receiver over `collective_rpc`.

For set-ups that drive `collective_rpc` themselves. vLLM appends this class to the worker's bases
and refuses any attribute that the worker already has, so every name is prefixed, and there is no
constructor.
"""

from typing import Protocol, cast

import torch
from vllm.config import VllmConfig, set_current_vllm_config

from reshard_vllm.receiver import Message, Receiver
from reshard_vllm.vllm_target import VllmTarget


class _ModelRunner(Protocol):
    def get_model(self) -> torch.nn.Module: ...


class _Worker(Protocol):
    """What the extension needs of vLLM's worker."""

    vllm_config: VllmConfig
    device: torch.device
    model_runner: _ModelRunner
    weight_transfer_engine: object


class WorkerExtension:
    """Methods that vLLM adds to its worker: none raises, each returns a dict or None."""

    def refit_connect(self, message: Message) -> None:
        """Join a session; `message` is a `ConnectInfo`."""
        self._refit_call("connect", message)

    def refit_receive(self, message: Message) -> None:
        """Start receiving a version; `message` is a `ReceiveInfo`."""
        self._refit_call("receive", message)

    def refit_commit(self, message: Message) -> None:
        """Make the received version live; `message` is a `CommitInfo`."""
        self._refit_call("commit", message)

    def refit_status(self, message: Message) -> dict[str, object]:
        """This rank's state, with the message's nonce."""
        return self._refit_receiver().status(message)

    def refit_close(self) -> None:
        """Leave the session; the engine serves on."""
        self._refit_receiver().close()

    def _refit_call(self, step: str, message: Message) -> None:
        worker = cast(_Worker, self)
        receiver = self._refit_receiver()
        with set_current_vllm_config(worker.vllm_config):
            getattr(receiver, step)(message)

    def _refit_receiver(self) -> Receiver:
        worker = cast(_Worker, self)
        engine = getattr(worker, "weight_transfer_engine", None)
        shared = getattr(engine, "_receiver", None)
        if isinstance(shared, Receiver):
            return shared
        held = self.__dict__.get("_refit_held_receiver")
        if not isinstance(held, Receiver):
            model = worker.model_runner.get_model()
            held = Receiver(VllmTarget(worker.vllm_config, worker.device, model))
            self.__dict__["_refit_held_receiver"] = held
        return held
