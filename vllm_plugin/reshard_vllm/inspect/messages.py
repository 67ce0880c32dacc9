"""What goes between the command and the rank processes: msgspec structs, JSON lines."""

from typing import Literal

import msgspec

Option = str | int | float | bool | None | dict[str, object] | list[object]


class Request(msgspec.Struct, frozen=True):
    """One model to inspect on all ranks.

    Attributes:
        model: folder of the checkpoint.
        tensor_parallel: ranks that share each layer.
        pipeline_parallel: stages.
        expert_parallel: whether experts are spread over the tensor parallel ranks.
        options: further arguments of vLLM's engine, by name (`dtype`, `quantization`, ...).
        verify: whether to load index-coded tensors through the map and compare.
        codings: how many different codings to compare.
    """

    model: str
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: bool = False
    options: dict[str, Option] = {}
    verify: bool = True
    codings: int = 2


class Place(msgspec.Struct, frozen=True):
    """Where elements of one checkpoint tensor go on one rank.

    Attributes:
        parameter: name of the parameter or buffer.
        kind: class of the destination.
        dtype: of the destination.
        boxes: of the checkpoint tensor, as offset and shape, in elements.
    """

    parameter: str
    kind: Literal["direct", "repacked", "computed", "refused"]
    dtype: str
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


class RankReport(msgspec.Struct, frozen=True):
    """What one rank would receive, by class, and what was proven of it.

    Attributes:
        rank: of the engine.
        model_class: vLLM's class.
        basis: what the classes were proven by (`checkpoint` or `rehearsal`).
        direct_bytes: bytes that land in live storage.
        repacked_bytes: bytes that a post-load step is repeated on.
        computed_bytes: bytes that the loader computes with.
        refused_bytes: bytes whose destination is refused.
        refused: reason by parameter.
        excess: by parameter, bytes that travel beyond what it keeps, and why.
        uncovered: by parameter, elements that no checkpoint tensor fills.
        unused: checkpoint tensors that this rank ignores.
        tensors: places by checkpoint tensor.
        differences: where the refit differs from vLLM's own loading; empty if bit-identical.
        verified: whether index-coded tensors were loaded and compared.
        error: why nothing can be said about this model; empty if it can.
    """

    rank: int
    model_class: str = ""
    basis: str = ""
    direct_bytes: int = 0
    repacked_bytes: int = 0
    computed_bytes: int = 0
    refused_bytes: int = 0
    refused: dict[str, str] = {}
    excess: dict[str, str] = {}
    uncovered: dict[str, int] = {}
    unused: tuple[str, ...] = ()
    tensors: dict[str, tuple[Place, ...]] = {}
    differences: tuple[str, ...] = ()
    verified: bool = False
    error: str = ""
