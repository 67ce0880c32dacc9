"""Which tensors go shard to shard, and which as full tensors, in other projects' resharding.

Read from their sources and documents; applied here to the shapes of models.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from reshard.ids import FQN
from reshard.simulation.models import Family, Role


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule by name.

    Attributes:
        name: for tables.
        _of_role: whether a tensor may go directly, given how many shards an engine cuts.
        _by_module: whether tensors of one module go directly all or none.
    """

    name: str
    _of_role: Callable[[Family, int], bool]
    _by_module: bool

    def direct(self, families: Mapping[FQN, Family], cuts: int) -> frozenset[FQN]:
        """The tensors that go directly.

        Args:
            families: of all tensors.
            cuts: tensor parallelism of the engine.
        """
        direct = {name for name, family in families.items() if self._of_role(family, cuts)}
        if self._by_module:
            mixed = {_module(name) for name in families if name not in direct}
            direct = {name for name in direct if _module(name) not in mixed}
        return frozenset(direct)


def _module(name: FQN) -> str:
    return name.rpartition(".")[0]


def _vllm_m2n(family: Family, cuts: int) -> bool:
    match family.role:
        case Role.COLUMN:
            return family.shape[0] % cuts == 0
        case Role.ROW:
            return family.shape[1] % cuts == 0
        case Role.REPLICATED:
            return True
        case _:
            return False


def _feed_forward(family: Family, cuts: int) -> bool:
    del cuts
    return family.role.is_expert or (
        ".mlp." in family.template
        and family.role in (Role.GATE_UP, Role.ROW)
        and "shared_expert" not in family.template
    )


VLLM_M2N: Final = Rule("vLLM nccl_m2n", _vllm_m2n, True)
"""vLLM 0.32, `m2n_layout.py`: a parameter of its own name with a plain linear loader, evenly cut.

Fused parameters (qkv, gate_up, experts), the vocabulary, norms and biases fall back to the full
tensor on every rank, and with them any other parameter of the same module.
"""

NEMO_RL: Final = Rule("NeMo-RL nccl_reshard", _feed_forward, False)
"""NeMo-RL, `docs/design-docs/nccl-reshard-refit.md`: feed-forward and expert projections go shard
to shard, all else (shared experts, attention, vocabulary, norms, routers) as packed broadcast."""
