"""The engine's side, inside vLLM's workers: recording of loaders, install, receiver."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reshard_vllm.extension import WorkerExtension

__all__ = ["WorkerExtension"]


def __getattr__(name: str) -> object:
    """`WorkerExtension`, imported when asked for: the plugin entry point must stay cheap."""
    if name == "WorkerExtension":
        from reshard_vllm.extension import WorkerExtension

        return WorkerExtension
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
