"""Weight sources: which regions of the canonical tensors this trainer rank holds, and where.

A source describes; it never gathers weights. Coordinate space: global regions, local views. Not
here: who receives what (`reshard.plan`), how it travels.
"""

from reshard_trainer.sources.adapters import Automatic
from reshard_trainer.sources.discovery import Part, Parts, whole
from reshard_trainer.sources.module import ModuleSource
from reshard_trainer.sources.protocol import MakeSource, WeightSource, views
from reshard_trainer.sources.recording import Adapter
from reshard_trainer.sources.transforms import ADD_ONE, Transform

__all__ = [
    "ADD_ONE",
    "Adapter",
    "Automatic",
    "MakeSource",
    "ModuleSource",
    "Part",
    "Parts",
    "Transform",
    "WeightSource",
    "views",
    "whole",
]
