"""Sizing a run before it is started: which mode, how many engines, how much staleness."""

from reshard_trainer.sizing.answer import Sizing, size
from reshard_trainer.sizing.timeline import Usage, simulate
from reshard_trainer.sizing.workload import EngineSpeed, Workload

__all__ = ["EngineSpeed", "Sizing", "Usage", "Workload", "simulate", "size"]
