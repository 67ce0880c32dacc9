"""The engine's side, inside vLLM's workers: recording of loaders, install, receiver."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reshard_vllm.extension import WorkerExtension
    from reshard_vllm.fence import FenceMiddleware

__all__ = ["FenceMiddleware", "WorkerExtension"]


def __getattr__(name: str) -> object:
    """What is imported when asked for: the plugin entry point must stay cheap."""
    if name == "FenceMiddleware":
        from reshard_vllm.fence import FenceMiddleware

        return FenceMiddleware
    if name == "WorkerExtension":
        from reshard_vllm.extension import WorkerExtension

        return WorkerExtension
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
