"""Discovering a layout by running the model's own loader once, on a skeleton, without data."""

from reshard_vllm.recording.loader_map import LoaderMap, Slot, layout_of

__all__ = ["LoaderMap", "Slot", "layout_of"]
