"""Device memory that the plans of one planner share, since only one of them is in use at a time."""

import torch


class SharedWorkspace:
    """Hands out one buffer to all who ask; a bigger wish makes a new one, the earlier stays with those who have it.

    Who asks for most should ask first. Users must be on one stream, or take care of the order themselves.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=dtype, device=device)
        self.bytes = 0
        """Of all buffers that were made."""

    def take(self, elements: int) -> torch.Tensor:
        """At least `elements` elements, zero when new."""
        if self._buffer.numel() < elements:
            with torch.inference_mode(False):  # so that it can be written in any mode
                self._buffer = torch.zeros(elements, dtype=self._buffer.dtype, device=self._device)
            self.bytes += self._buffer.nbytes
        return self._buffer
