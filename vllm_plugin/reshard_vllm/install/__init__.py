"""From received bytes to live weights: where they may land, by proof, and how they take effect."""

from reshard_vllm.install.classes import Faults, class_bytes, find_faults
from reshard_vllm.install.installer import VllmInstaller
from reshard_vllm.install.proof import Proof, prove

__all__ = ["Faults", "Proof", "VllmInstaller", "class_bytes", "find_faults", "prove"]
