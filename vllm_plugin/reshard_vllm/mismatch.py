"""What sets a trainer's tensors apart from the checkpoint that an engine was loaded from.

Asked only once the loader has rejected them: other names can be as good (experts fused or one by
one), and then the loader takes them.
"""

from collections.abc import Sequence

from reshard.session import TensorSpec


def mismatches(given: Sequence[TensorSpec], loaded: Sequence[TensorSpec]) -> list[str]:
    """Every difference in names and shapes, one line each, sorted by name.

    >>> from reshard.session import TensorSpec
    >>> mismatches([TensorSpec("a", (2,), "float32")], [TensorSpec("a", (3,), "float32")])
    ['a: shape (2,) at the trainer, (3,) in the checkpoint of the engine']

    Args:
        given: the trainer's tensors.
        loaded: those of the checkpoint that the engine loaded.
    """
    ours = {spec.name: spec.shape for spec in given}
    theirs = {spec.name: spec.shape for spec in loaded}
    faults = []
    for name in sorted({*ours, *theirs}):
        if name not in theirs:
            faults.append(f"{name}: unknown to the checkpoint of the engine")
        elif name not in ours:
            faults.append(f"{name}: in the checkpoint of the engine, not at the trainer")
        elif ours[name] != theirs[name]:
            faults.append(
                f"{name}: shape {ours[name]} at the trainer, {theirs[name]} in the checkpoint of "
                "the engine"
            )
    return faults
