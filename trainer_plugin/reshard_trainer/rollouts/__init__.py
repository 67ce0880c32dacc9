"""Rollouts: generating them at one version, or all the time with bounded staleness.

What a training script needs has its name here; the parts are in the modules.
"""

from reshard_trainer.rollouts.asynchronous import AsynchronousRollouts
from reshard_trainer.rollouts.background import asynchronous_in_background, sequential_in_background
from reshard_trainer.rollouts.buffer import Batch
from reshard_trainer.rollouts.desk import DeskSettings, SavedDesk
from reshard_trainer.rollouts.errors import StaleEngine
from reshard_trainer.rollouts.generating import Generating
from reshard_trainer.rollouts.http_endpoint import HttpEndpoint
from reshard_trainer.rollouts.local_endpoint import LocalEndpoint
from reshard_trainer.rollouts.logs import JsonLines
from reshard_trainer.rollouts.meter import Meter
from reshard_trainer.rollouts.prompts import ShuffledPrompts
from reshard_trainer.rollouts.refresh import HookRefresher, WatchRefresher
from reshard_trainer.rollouts.reward import immediate, threaded
from reshard_trainer.rollouts.rollout import Prompt, PromptId, Rollout, RolloutGroup, VersionSpan
from reshard_trainer.rollouts.sampling import Sampling
from reshard_trainer.rollouts.sequential import SequentialRollouts, batch_of
from reshard_trainer.rollouts.staleness import StalenessBound

__all__ = [
    "AsynchronousRollouts",
    "Batch",
    "DeskSettings",
    "Generating",
    "HookRefresher",
    "HttpEndpoint",
    "JsonLines",
    "LocalEndpoint",
    "Meter",
    "Prompt",
    "PromptId",
    "Rollout",
    "RolloutGroup",
    "Sampling",
    "SavedDesk",
    "SequentialRollouts",
    "ShuffledPrompts",
    "StaleEngine",
    "StalenessBound",
    "VersionSpan",
    "WatchRefresher",
    "asynchronous_in_background",
    "batch_of",
    "immediate",
    "sequential_in_background",
    "threaded",
]
