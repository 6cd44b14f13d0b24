"""Bytes with the rights to them: global memory as separate buffers, and spaces that the programs share."""

from __future__ import annotations

import numpy as np

from ptx.races import GRANULE, Races

READABLE, WRITABLE, WRITTEN = 1, 2, 4
NOT_WRITTEN = 0xFF  # a NaN in every type, wherever it is read
_APART = 40  # buffer i lies at (i + 1) << _APART, so that nothing which leaves one arrives in another
_OFFSET = np.uint64((1 << _APART) - 1)


def granules(places: np.ndarray) -> np.ndarray:
    """The [n, granules] that `races` keeps of [n, bytes] places."""
    return places[:, ::GRANULE] // GRANULE


class Space:
    """A memory: bytes, what may be done to each, and who did it."""

    def __init__(self, size: int, state: int = 0):
        self.bytes = np.full(size, NOT_WRITTEN, np.uint8)
        self.state = np.full(size, state, np.uint8)
        self.races = Races(size)


class Buffers:
    """Global memory: the arrays of one call, each at an address of its own."""

    def __init__(self, sizes: list[int]):
        room = [-(-size // 256) * 256 for size in sizes]  # no granule of `races` is of two
        self._starts = np.cumsum([0, *room[:-1]])
        self._sizes = np.array(sizes)
        self.space = Space(sum(room))

    def address(self, buffer: int) -> int:
        return (buffer + 1) << _APART

    def at(self, address: np.uint64) -> int:
        """The buffer that an address is in."""
        return int(address >> np.uint64(_APART)) - 1

    def span(self, buffer: int, nbytes: int) -> slice:
        """The place of a buffer in `space`."""
        start = int(self._starts[buffer])
        return slice(start, start + nbytes)

    def find(self, addresses: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """The places of addresses in `space`, and whether all `width` bytes there are one buffer's."""
        buffer = (addresses >> np.uint64(_APART)).astype(np.int64) - 1
        offset = (addresses & _OFFSET).astype(np.int64)
        known = (buffer >= 0) & (buffer < len(self._sizes))
        buffer = np.where(known, buffer, 0)
        return self._starts[buffer] + offset, known & (offset + width <= self._sizes[buffer])


class Shared(Space):
    """The shared memory of the programs that run, `room` bytes each, and what is on its way to it and from it."""

    def __init__(self, size: int, programs: int):
        self.room = -(-max(size, 1) // 16) * 16
        super().__init__(programs * self.room, WRITABLE)
        granules = len(self.races.writer)
        self.filling = np.zeros(granules, bool)  # by cp.async
        self.reading = np.zeros(granules, np.uint16)  # by asynchronous products
        self.unfenced = np.zeros(granules, bool)  # written, and no fence.proxy.async since
