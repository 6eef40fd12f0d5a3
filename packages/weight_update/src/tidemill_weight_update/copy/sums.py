"""Checksums and non-finite counts that are accumulated while tensors are copied."""

import numpy as np
import torch
from numpy.typing import NDArray


class TensorSums:
    """Checksums, and numbers of non-finite elements, by tensor: accumulated on a device, read on the host.

    Args:
        num_tensors: number of tensors.
        device: device of the sums.
        counts_non_finite: whether non-finite elements are counted.

    Attributes:
        checksums: int64 [num_tensors] on the device.
        non_finite: int32 [num_tensors] on the device; None if they are not counted.
    """

    def __init__(self, num_tensors: int, device: torch.device, *, counts_non_finite: bool) -> None:
        # One buffer, so that one transfer is enough.
        self._sums = torch.zeros(num_tensors * (12 if counts_non_finite else 8), dtype=torch.uint8, device=device)
        self._num_tensors = num_tensors
        self.checksums = self._sums[: 8 * num_tensors].view(torch.int64)
        self.non_finite = self._sums[8 * num_tensors :].view(torch.int32) if counts_non_finite else None
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        self._on_host = torch.empty_like(self._sums, device="cpu", pin_memory=True) if self._event else self._sums

    def clear(self) -> None:
        """Set all sums to zero, in the order of the current stream."""
        self._sums.zero_()

    def fetch(self) -> None:
        """Queue the transfer to the host on the current stream."""
        if self._event is not None:
            self._on_host.copy_(self._sums, non_blocking=True)
            self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Return when the transfer queued by `fetch` is complete."""
        if self._event is not None:
            self._event.synchronize()

    def checksums_on_host(self) -> NDArray[np.int64]:
        """Return the checksums of the last transfer: int64 [num_tensors]; the next `fetch` overwrites them."""
        return self._on_host[: 8 * self._num_tensors].numpy().view(np.int64)

    def not_finite(self) -> list[int]:
        """Return the indices of tensors with non-finite elements, as of the last transfer."""
        return np.flatnonzero(self._on_host[8 * self._num_tensors :].numpy().view(np.int32)).tolist()
