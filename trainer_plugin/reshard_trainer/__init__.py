"""The trainer's side: weight sources, the hook, the publisher, clients of engines."""

from reshard_trainer.attaching import attach
from reshard_trainer.engines import HttpEngine
from reshard_trainer.hook import Hook
from reshard_trainer.in_process import InProcessEngine
from reshard_trainer.names import global_names
from reshard_trainer.reports import EngineReport, RefitReport
from reshard_trainer.restore import restore
from reshard_trainer.settings import Settings
from reshard_trainer.sources import ADD_ONE, ModuleSource, Part, Transform, WeightSource

__all__ = [
    "ADD_ONE",
    "EngineReport",
    "Hook",
    "HttpEngine",
    "InProcessEngine",
    "ModuleSource",
    "Part",
    "RefitReport",
    "Settings",
    "Transform",
    "WeightSource",
    "attach",
    "global_names",
    "restore",
]
