"""From torch's DTensor to the layout algebra.

Coordinate space: trainer ranks, global regions. Not here: plain tensors, names.
"""

from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import Replicate as TorchReplicate
from torch.distributed.tensor.placement_types import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard as TorchStridedShard

from reshard.errors import LayoutError
from reshard.layout.sharding import Mesh, Placement, Replicate, Shard, Sharding, StridedShard
from reshard_trainer.ensemble import Ensemble


def sharding_of(tensor: DTensor, ensemble: Ensemble) -> Sharding:
    """How `tensor` lies on the trainer's ranks.

    Raises:
        LayoutError: a placement that holds no elements of the tensor (a partial sum), or a mesh
            with ranks outside the ensemble.
    """
    mesh = tensor.device_mesh
    ranks = ensemble.trainer_ranks(mesh.mesh.flatten().tolist())
    axes = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
    placements = tuple(map(_placement, tensor.placements))
    sharding = Sharding(Mesh(tuple(mesh.mesh.shape), ranks, axes), placements, tuple(tensor.shape))
    if any(isinstance(placement, StridedShard) for placement in placements):
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
