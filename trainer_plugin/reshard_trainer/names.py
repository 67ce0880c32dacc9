"""Canonical names: what a checkpoint calls a tensor, whatever the trainer has wrapped around it.

Coordinate space: names alone. Not here: which tensors a model has (`sources.py`).
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
