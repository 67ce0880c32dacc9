"""Canonical names: what a checkpoint calls a tensor, whatever the trainer has wrapped around it.

Coordinate space: names alone. Not here: which tensors a model has (`sources/`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final

from reshard.errors import LayoutError
from reshard.ids import FQN

WRAPPERS: Final = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module"}
)
"""Attributes under which torch.compile, FSDP, activation checkpointing and DDP keep a module."""

Rename = Callable[[str], str]
"""From a trainer's name to the canonical one."""


def strip_wrappers(name: str) -> str:
    """`name` without the wrappers' attributes, at any depth.

    >>> strip_wrappers("module._orig_mod.layers.0._checkpoint_wrapped_module.mlp.weight")
    'layers.0.mlp.weight'
    """
    *path, last = name.split(".")
    return ".".join([*(part for part in path if part not in WRAPPERS), last])


def global_names(**first: int) -> Rename:
    """For a rank with a part of the layers or experts, which it numbers from zero.

    Args:
        first: by the name of a module list, the global number of the rank's first module; a rank
            of the second of two stages of 16 layers has `layers=16`.

    >>> global_names(layers=16, experts=4)("module.model.layers.0.mlp.experts.1.up_proj.weight")
    'model.layers.16.mlp.experts.5.up_proj.weight'
    """

    def rename(name: str) -> str:
        parts = strip_wrappers(name).split(".")
        for at in range(1, len(parts)):
            if parts[at - 1] in first and parts[at].isdecimal():
                parts[at] = str(int(parts[at]) + first[parts[at - 1]])
        return ".".join(parts)

    return rename


def canonical_names(names: Iterable[str], rename: Rename = strip_wrappers) -> dict[str, FQN]:
    """The canonical name of each of `names`, in canonical (sorted) order.

    >>> canonical_names(["module.b", "module.a"])
    {'module.a': 'a', 'module.b': 'b'}

    Raises:
        LayoutError: two names become equal; lists them all.
    """
    given = defaultdict(list)
    for name in names:
        given[FQN(rename(name))].append(name)
    clashes = [
        f"{canonical}: {', '.join(sorted(held))}"
        for canonical, held in sorted(given.items())
        if len(held) > 1
    ]
    if clashes:
        raise LayoutError(
            "tensors of the model get the same canonical name; pass `rename` to tell them apart",
            clashes,
        )
    return {held[0]: canonical for canonical, held in sorted(given.items())}
