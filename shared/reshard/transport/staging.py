"""Buffers for messages, made once: the first touch of fresh memory costs more than the copy."""

import torch


class Staging:
    """Buffers that successive exchanges of one group use in turn, never two at a time.

    Attributes:
        held_bytes: size of all buffers together.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}

    @property
    def held_bytes(self) -> int:
        """Size of all buffers together."""
        return sum(buffer.numel() for buffer in self._buffers.values())

    def take(self, role: str, number: int, nbytes: int) -> torch.Tensor:
        """The buffer of that role and number, as a flat uint8 tensor of exactly `nbytes`.

        It grows where it was smaller; what was taken before is then another buffer.
        """
        buffer = self._buffers.get((role, number))
        if buffer is None or buffer.numel() < nbytes:
            buffer = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
            self._buffers[role, number] = buffer
        return buffer[:nbytes]
