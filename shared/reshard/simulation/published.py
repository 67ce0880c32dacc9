"""Published refit times, what is known of how they were measured, and what the model says.

One machine for all rows: H100 nodes by their data sheet, as `Machine` has them. No constant is
chosen by row. Where a layout was not published in full, `assumed` says what stands in for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from reshard.dtypes import DType
from reshard.simulation.machine import Machine
from reshard.simulation.methods import (
    Prediction,
    Refit,
    broadcast_one,
    broadcast_stages,
    by_rule,
    of_model,
    pull,
    push,
    reshard,
)
from reshard.simulation.models import model
from reshard.simulation.parallelism import parse_parallelism
from reshard.simulation.rules import NEMO_RL

_NEMO = "https://github.com/NVIDIA-NeMo/RL/blob/main/docs/design-docs/nccl-reshard-refit.md"
_SKYRL = "https://github.com/NovaSky-AI/SkyRL/pull/2090"
_MILES = "https://github.com/radixark/miles/blob/main/docs/advanced/p2p-weight-transfer.md"
_LEQUN = "https://le.qun.ch/en/blog/2025/09/17/rl-weight-transfer-2"


def _nemo(refit: Refit, machine: Machine) -> Prediction:
    return by_rule(refit, machine, NEMO_RL)


@dataclass(frozen=True, slots=True)
class Published:
    """One published figure.

    Attributes:
        model: a name of `models.MODELS`.
        method: in the publisher's words.
        trainer, engine: parallelism, as far as it is published.
        nodes: of eight GPUs.
        wire: dtype that travels; the trainer's tensors count as of the same size.
        fastest, slowest: published seconds.
        source: address; empty: none was found.
        assumed: what had to be assumed.
        simulate: the method of ours that stands for theirs.
    """

    model: str
    method: str
    trainer: str
    engine: str
    nodes: int
    wire: DType
    fastest: float
    slowest: float
    source: str
    assumed: str
    simulate: Callable[[Refit, Machine], Prediction]

    def predict(self) -> tuple[Prediction, Prediction]:
        """Their method, and our plan, on the same machine."""
        refit = of_model(
            model(self.model),
            parse_parallelism(self.trainer),
            parse_parallelism(self.engine),
            self.wire,
            self.wire,
        )
        machine = Machine(self.nodes)
        return self.simulate(refit, machine), reshard(refit, machine)


PUBLISHED: Final = (
    Published(
        "deepseek-v3",
        "NeMo-RL nccl_reshard",
        "pp=16,dp=16,ep=16",
        "tp=32,dp=8",
        64,
        "bfloat16",
        2.39,
        2.83,
        _NEMO,
        "link rate of a DGX H100; stages of 4 layers (the last of 1); MTP layer left out",
        _nemo,
    ),
    Published(
        "qwen3-30b-a3b",
        "NeMo-RL nccl_reshard",
        "pp=2,dp=8,ep=8",
        "tp=8,dp=2",
        4,
        "bfloat16",
        0.74,
        1.00,
        _NEMO,
        "link rate of a DGX H100",
        _nemo,
    ),
    Published(
        "qwen3-235b-a22b",
        "SkyRL NCCL broadcast",
        "tp=4,dp=2,pp=2,ep=8",
        "dp=16,ep=16",
        4,
        "bfloat16",
        64.72,
        64.72,
        _SKYRL,
        "network not published: 400 Gb/s a GPU; merging of the LoRA adapters left out",
        broadcast_one,
    ),
    Published(
        "qwen3-235b-a22b",
        "SkyRL sharded RDT (pull)",
        "tp=4,dp=2,pp=2,ep=8",
        "dp=16,ep=16",
        4,
        "bfloat16",
        3.54,
        3.54,
        _SKYRL,
        "network not published: 400 Gb/s a GPU; merging of the LoRA adapters left out",
        pull,
    ),
    Published(
        "qwen3-235b-a22b",
        "miles NCCL broadcast",
        "tp=4,dp=4,pp=4,ep=16",
        "tp=32,dp=2,ep=32",
        16,
        "bfloat16",
        10.75,
        10.75,
        _MILES,
        "link rate; two engines of 32 ranks; all stages broadcast at the same time",
        broadcast_stages,
    ),
    Published(
        "qwen3-235b-a22b",
        "miles P2P (RDMA writes)",
        "tp=4,dp=4,pp=4,ep=16",
        "tp=32,dp=2,ep=32",
        16,
        "bfloat16",
        3.16,
        3.16,
        _MILES,
        "link rate; two engines of 32 ranks; the staging through host memory left out",
        pull,
    ),
    Published(
        "kimi-k2",
        "miles NCCL broadcast",
        "tp=8,dp=4,pp=8,ep=32",
        "tp=32,dp=8,ep=32",
        64,
        "float8_e4m3fn",
        53.28,
        53.28,
        _MILES,
        "link rate; eight engines of 32 ranks; gathered in 8 bits (really 16, then quantized); "
        "scales left out",
        broadcast_stages,
    ),
    Published(
        "kimi-k2",
        "miles P2P (RDMA writes)",
        "tp=8,dp=4,pp=8,ep=32",
        "tp=32,dp=8,ep=32",
        64,
        "float8_e4m3fn",
        7.23,
        7.23,
        _MILES,
        "as above; 0.88 s of requantization on the engines, which the figure includes, left out",
        pull,
    ),
    Published(
        "kimi-k2",
        "RDMA writes (L. Chen)",
        "fsdp=256,ep=32",
        "tp=8,dp=16,ep=128",
        48,
        "float8_e4m3fn",
        1.3,
        1.3,
        _LEQUN,
        "256 trainer and 128 engine GPUs, FSDP over nodes for experts; degrees are not published; "
        "gathered and sent in 8 bits (really gathered in 16)",
        push,
    ),
    Published(
        "kimi-k2",
        "pull, 48 nodes",
        "tp=8,dp=4,pp=8,ep=32",
        "tp=32,dp=4,ep=32",
        48,
        "float8_e4m3fn",
        7.5,
        7.5,
        "",
        "nothing is known but the number of nodes: laid out as miles does on 64",
        pull,
    ),
)
"""The figures."""
