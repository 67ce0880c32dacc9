"""The trainer's side: weight sources, the hook, the publisher, clients of engines."""

from reshard_trainer.engines import HttpEngine
from reshard_trainer.hook import Hook, attach
from reshard_trainer.in_process import InProcessEngine
from reshard_trainer.reports import EngineReport, RefitReport
from reshard_trainer.settings import Settings
from reshard_trainer.sources import ModuleSource, WeightSource

__all__ = [
    "EngineReport",
    "Hook",
    "HttpEngine",
    "InProcessEngine",
    "ModuleSource",
    "RefitReport",
    "Settings",
    "WeightSource",
    "attach",
]
