"""Discovering a layout by running the model's own loader once, on a skeleton, without data."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reshard_vllm.recording.loader_map import LoaderMap, Slot, layout_of

__all__ = ["LoaderMap", "Slot", "layout_of"]


def __getattr__(name: str) -> object:
    """What needs vLLM, imported when asked for: the tape and its meaning need torch alone."""
    if name in __all__:
        from reshard_vllm.recording import loader_map

        return getattr(loader_map, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
