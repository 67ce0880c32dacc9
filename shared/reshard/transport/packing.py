"""A bucket as bytes: which copies fill it, which copies empty it, and when neither is needed.

The elements of a move travel row-major in canonical order, in the wire dtype.
"""

import torch

from reshard.plan import Bucket, Move
from reshard.transport.places import CopyList, Locate, checked, part, torch_dtype


def filling(bucket: Bucket, message: torch.Tensor, read: Locate) -> CopyList:
    """The copies that pack a bucket.

    Args:
        bucket: what it holds.
        message: flat uint8 tensor of the bucket's size.
        read: where the elements lie.
    """
    copies = CopyList()
    for move, offset in zip(bucket.moves, bucket.offsets, strict=True):
        packed, wire = _packed(message, move, offset), torch_dtype(move.wire_dtype)
        for region, view in checked(read(move), move, "source"):
            copies.add(part(packed, move.region, region), view, wire)
    return copies


def emptying(bucket: Bucket, message: torch.Tensor, write: Locate) -> CopyList:
    """The copies that unpack a bucket; arguments as for `filling`."""
    copies = CopyList()
    for move, offset in zip(bucket.moves, bucket.offsets, strict=True):
        packed, wire = _packed(message, move, offset), torch_dtype(move.wire_dtype)
        for region, view in checked(write(move), move, "destination"):
            copies.add(view, part(packed, move.region, region), wire)
    return copies


def in_place(bucket: Bucket, locate: Locate) -> torch.Tensor | None:
    """The bucket's bytes where they lie or belong, if that is one stretch of memory in its order.

    Then nothing is packed or unpacked: the message is the memory itself.
    """
    memory: torch.Tensor | None = None
    for move, offset in zip(bucket.moves, bucket.offsets, strict=True):
        view = _only_view(move, locate)
        if view is None:
            return None
        start = int(view.storage_offset()) * view.element_size()
        if memory is None:
            storage = view.untyped_storage()
            if start + bucket.nbytes > storage.nbytes():
                return None
            memory = torch.empty(0, dtype=torch.uint8, device=view.device)
            memory = memory.set_(storage, start, (bucket.nbytes,), (1,))
        elif view.data_ptr() != memory.data_ptr() + offset:
            return None
    # Padding between dtypes belongs to nobody, so it must not be received into the weights.
    return memory if sum(move.nbytes for move in bucket.moves) == bucket.nbytes else None


def _only_view(move: Move, locate: Locate) -> torch.Tensor | None:
    """A move's one place, if it is contiguous and in the wire dtype."""
    places = locate(move)
    if len(places) != 1:
        return None
    region, view = places[0]
    if region != move.region or not view.is_contiguous():
        return None
    return view if view.dtype == torch_dtype(move.wire_dtype) else None


def _packed(message: torch.Tensor, move: Move, offset: int) -> torch.Tensor:
    """The part of a message that holds a move, of the shape of its region."""
    flat = message[offset : offset + move.nbytes].view(torch_dtype(move.wire_dtype))
    return flat.view(move.region.shape)
