"""From torch's DTensor to the layout algebra.

Coordinate space: trainer ranks, global regions. Not here: plain tensors, names.
"""

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import Replicate as TorchReplicate
from torch.distributed.tensor.placement_types import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard as TorchStridedShard

from reshard.errors import LayoutError
from reshard.layout.sharding import Mesh, Placement, Replicate, Shard, Sharding, StridedShard
from reshard_trainer.ensemble import Ensemble


def sharding_of(
    mesh: DeviceMesh,
    placements: Sequence[TorchPlacement],
    shape: tuple[int, ...],
    ensemble: Ensemble,
) -> Sharding:
    """How a DTensor of that mesh, those placements and that shape lies on the trainer's ranks.

    Raises:
        LayoutError: a placement that holds no elements of the tensor (a partial sum), or a mesh
            with ranks outside the ensemble.
    """
    ranks = ensemble.trainer_ranks(mesh.mesh.flatten().tolist())
    axes = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
    known = tuple(map(_placement, placements))
    sharding = Sharding(Mesh(tuple(mesh.mesh.shape), ranks, axes), known, shape)
    if any(isinstance(placement, StridedShard) for placement in known):
        # FSDP2 over tensor parallelism: on uneven sizes its cuts are not what the placements say.
        return sharding.in_cut_order()
    return sharding


def _placement(placement: TorchPlacement) -> Placement:
    match placement:
        case TorchReplicate():
            return Replicate()
        case TorchStridedShard():
            return StridedShard(placement.dim, int(placement.split_factor))
        case TorchShard():
            return Shard(placement.dim)
        case Partial():
            raise LayoutError(
                f"placement {placement}: each rank holds a partial sum, not elements of the "
                "tensor; redistribute it to Shard or Replicate before publishing"
            )
        case _:
            raise LayoutError(f"placement {placement!r} is not known to this version of reshard")
