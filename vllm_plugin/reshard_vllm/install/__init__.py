"""From received bytes to live weights: where they may land, by proof, and how they take effect."""

from reshard_vllm.install.installer import VllmInstaller
from reshard_vllm.install.proof import Proof, prove

__all__ = ["Proof", "VllmInstaller", "prove"]
