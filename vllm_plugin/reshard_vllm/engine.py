"""The weight-transfer backend `reshard`: vLLM's engine interface over a `Receiver`.

A thin shim. Nothing here raises, parsing included: vLLM's worker replies go out of step for good
after an exception (vllm#49972).
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from reshard_vllm.receiver import Receiver
from reshard_vllm.vllm_target import VllmTarget

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass
class ReshardInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """`{"session": ConnectInfo}`; anything else is reported by the receiver, not by parsing."""

    session: dict[str, object] = field(default_factory=dict)


@dataclass
class ReshardUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """`{"step": "receive" | "commit", "message": ReceiveInfo | CommitInfo}`."""

    step: str = ""
    message: dict[str, object] = field(default_factory=dict)


class ReshardTransferEngine(
    WeightTransferEngine[ReshardInitInfo, ReshardUpdateInfo]  # type: ignore[misc]
):
    """Receives this rank's shard of each policy version."""

    init_info_cls = ReshardInitInfo
    update_info_cls = ReshardUpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: "VllmConfig",
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._receiver = Receiver(VllmTarget(vllm_config, device, model))

    def parse_init_info(self, init_dict: dict[str, Any]) -> ReshardInitInfo:
        """The session to join; never raises."""
        return ReshardInitInfo(session=_mapping(init_dict, "session"))

    def parse_update_info(self, update_dict: dict[str, Any]) -> ReshardUpdateInfo:
        """The step to take; never raises."""
        step = update_dict.get("step", "") if isinstance(update_dict, dict) else ""
        return ReshardUpdateInfo(step=str(step), message=_mapping(update_dict, "message"))

    def init_transfer_engine(self, init_info: ReshardInitInfo) -> None:
        """Join a session."""
        self._receiver.connect(init_info.session)

    def start_weight_update(self) -> None:
        """Note that vLLM's own update session is open."""
        self._receiver.update_active = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take one step of a refit."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: ReshardUpdateInfo) -> None:
        """Take one step of a refit."""
        if update_info.step == "commit":
            self._receiver.commit(update_info.message)
        else:
            self._receiver.receive(update_info.message)

    def finish_weight_update(self) -> None:
        """Note that vLLM's own update session is closed."""
        self._receiver.update_active = False

    def shutdown(self) -> None:
        """Leave the session; the engine serves on."""
        self._receiver.close()


def _mapping(given: object, key: str) -> dict[str, object]:
    value = given.get(key) if isinstance(given, dict) else None
    return value if isinstance(value, dict) else {}
