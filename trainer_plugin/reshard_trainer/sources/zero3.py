"""ZeRO-3: each parameter flattened and cut into equal intervals, the last one padded.

Known by the attributes that DeepSpeed gives its partitioned parameters: `ds_id`, `ds_shape` (of the
whole), `ds_numel` (its elements, without padding) and `ds_tensor` (this rank's interval, padded).
DeepSpeed itself is not imported. Which interval a rank has is its rank in `ds_process_group`, or
in the trainer where there is none.
"""

import torch
import torch.distributed as dist

from reshard.errors import LayoutError
from reshard_trainer.ensemble import Ensemble
from reshard_trainer.sources.held import Held, held_interval


def is_partitioned(tensor: torch.Tensor) -> bool:
    """Whether ZeRO-3 has this parameter."""
    return hasattr(tensor, "ds_id") and hasattr(tensor, "ds_numel")


def held_partition(tensor: torch.Tensor, ensemble: Ensemble) -> Held:
    """This rank's interval of a partitioned parameter.

    Raises:
        LayoutError: it is not in memory, or not as long as the algebra says.
    """
    part: torch.Tensor | None = getattr(tensor, "ds_tensor", None)
    if part is None:
        raise LayoutError("ZeRO-3 has not partitioned it yet; attach after deepspeed.initialize")
    status = str(getattr(getattr(part, "status", None), "name", ""))
    if status == "NOT_AVAILABLE" or part.device.type == "meta":
        raise LayoutError("ZeRO-3 keeps it on NVMe; only parameters in memory can be published")
    rank, size = _position(tensor, ensemble)
    numel = int(tensor.ds_numel)  # type: ignore[attr-defined]
    shape = tuple(tensor.ds_shape)  # type: ignore[attr-defined]
    length = -(-numel // size)
    if part.ndim != 1 or part.numel() != length or not part.is_contiguous():
        raise LayoutError(
            f"ZeRO-3's interval is of shape {tuple(part.shape)}; {numel} elements over {size} "
            f"ranks are {length} for each"
        )
    first = min(rank * length, numel)
    start = int(part.storage_offset())
    return held_interval(part, shape, first, start, min(length, numel - first))


def _position(tensor: torch.Tensor, ensemble: Ensemble) -> tuple[int, int]:
    group: dist.ProcessGroup | None = getattr(tensor, "ds_process_group", None)
    if group is None:
        return ensemble.rank, ensemble.size
    return dist.get_rank(group), dist.get_world_size(group)
