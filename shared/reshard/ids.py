"""Names that are easily swapped, as distinct types.

Mixing rank spaces is this field's bug, so each space has a type of its own.
Not here: anything with behaviour.
"""

from typing import NewType

FQN = NewType("FQN", str)
"""A tensor's canonical name: the checkpoint (Hugging Face) name that vLLM's loader takes."""

GroupRank = NewType("GroupRank", int)
"""Rank within one refit: trainer ranks first, then one engine's ranks.

Every layout, plan and transport counts in this space.
"""

TrainerRank = NewType("TrainerRank", int)
"""Rank within the trainer, `0 .. trainer_size - 1`; equal to the group rank of the same process."""

EngineRank = NewType("EngineRank", int)
"""Rank within one engine, data-parallel replicas included; group rank minus the trainer's size."""

PolicyVersion = NewType("PolicyVersion", int)
"""Number of published optimizer steps; vLLM's `weight_version` is its `str`."""
