"""Small transfers that belong to a computation, through pinned buffers that are used again and again.

``Outbox`` brings tensors to the host in one copy, and the host waits for it. ``Inbox`` sends arrays to the
device without waiting; its memory may be used anew once the host knows that the device is past it
(``reset``)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from .streams import Gpu

ALIGN = 64
BLOCK = 8 << 20  # larger tensors travel in pieces of so many bytes


def _offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where things of these sizes begin behind each other, and the end."""
    at, out = 0, []
    for size in sizes:
        out.append(at)
        at += -(-size // ALIGN) * ALIGN
    return out, at


class Outbox:
    """From the device to the host."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._host = torch.empty(0, dtype=torch.uint8)
        self._device = torch.empty(0, dtype=torch.uint8)

    def bring(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors' values on the host. The host waits for them, and so for all that was computed before.

        What is returned is valid until the next call.
        """
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        offsets, end = _offsets(sizes)
        if self._host.numel() < end:
            self._host = self._gpu.pinned(end)
            self._device = torch.empty(end, dtype=torch.uint8, device=self._gpu.device)
        for tensor, at, size in zip(tensors, offsets, sizes, strict=True):
            self._device[at : at + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self._gpu.bring(self._host.data_ptr(), self._device.data_ptr(), end)
        self._gpu.mark_compute().synchronize()
        return [
            self._host[at : at + size].view(tensor.dtype).view(tensor.shape)
            for tensor, at, size in zip(tensors, offsets, sizes, strict=True)
        ]

    def bring_large(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor [n, ...] on the host, in memory of its own, in as many pieces as it takes."""
        rows = max(1, BLOCK * len(tensor) // max(1, tensor.numel() * tensor.element_size()))
        if len(tensor) <= rows:
            return self.bring([tensor])[0].clone()
        return torch.cat([self.bring([part])[0].clone() for part in torch.split(tensor, rows)])


class Inbox:
    """From the host to the device, in order with the computation."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._host: list[torch.Tensor] = []  # filled in this order
        self._filled = 0  # bytes of the last one in use
        self._current = 0  # which one

    def reset(self) -> None:
        """The host knows that the device has taken everything that was sent."""
        self._filled = self._current = 0

    def send(self, arrays: Sequence[NDArray[np.generic]]) -> list[torch.Tensor]:
        """The arrays' values on the device, in one copy."""
        offsets, end = _offsets([array.nbytes for array in arrays])
        if end == 0:
            return [self._empty(array) for array in arrays]
        host = self._take(end)
        filled = host.numpy()
        for array, at in zip(arrays, offsets, strict=True):
            filled[at : at + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        device = torch.empty(end, dtype=torch.uint8, device=self._gpu.device)
        self._gpu.send(device.data_ptr(), host.data_ptr(), end)
        return [
            device[at : at + array.nbytes].view(_dtype(array)).view(array.shape)
            for array, at in zip(arrays, offsets, strict=True)
        ]

    def send_large(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor [n, ...] of the host on the device, in as many pieces as it takes."""
        size = tensor.numel() * tensor.element_size()
        rows = max(1, BLOCK * len(tensor) // max(1, size))
        if len(tensor) <= rows:
            return self.send([tensor.numpy()])[0]
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._gpu.device)
        at = 0
        for part in torch.split(tensor, rows):
            out[at : at + len(part)] = self.send([part.numpy()])[0]
            at += len(part)
            if at < len(tensor):
                self._gpu.mark_compute().synchronize()  # the pinned buffer stays small
                self.reset()
        return out

    def _take(self, nbytes: int) -> torch.Tensor:
        """A part of the pinned memory that nothing else uses now."""
        while self._current < len(self._host):
            buffer = self._host[self._current]
            if self._filled + nbytes <= buffer.numel():
                self._filled += nbytes
                return buffer[self._filled - nbytes : self._filled]
            self._current += 1
            self._filled = 0
        self._host.append(self._gpu.pinned(max(nbytes, 1 << 16)))
        self._filled = nbytes
        return self._host[-1][:nbytes]

    def _empty(self, array: NDArray[np.generic]) -> torch.Tensor:
        return torch.empty(array.shape, dtype=_dtype(array), device=self._gpu.device)


def _dtype(array: NDArray[np.generic]) -> torch.dtype:
    return torch.from_numpy(np.zeros(0, dtype=array.dtype)).dtype
