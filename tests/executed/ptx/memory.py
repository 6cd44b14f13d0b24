"""Memory: bytes with the rights to them, and races: who read and who wrote each byte last."""

from __future__ import annotations

import numpy as np

READABLE, WRITABLE, WRITTEN = 1, 2, 4
NOT_WRITTEN = 0xFF  # a NaN in every type, wherever it is read
_APART = 40  # buffer i lies at (i + 1) << _APART, so that nothing which leaves one arrives in another

# A reader or writer is one number: its program from bit 42 on, the bar.syncs it had passed from 26 on, the
# bar.warp.syncs its warp had passed from 12 on, its thread below. In place of a thread of 0 to 1023:
_THREADS = 2048  # several of one warp; added to one of them
_WARPS = 4095  # several of several warps
_PROGRAMS = np.int64(2**63 - 1)  # of several programs


def identity(program: np.ndarray, barriers: np.ndarray, warp_barriers: np.ndarray, thread: np.ndarray) -> np.ndarray:
    """The identities of these threads at this moment, as one number each."""
    return program.astype(np.int64) << 42 | barriers << 26 | warp_barriers << 12 | thread


def _compare(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return where two are of one program; of one program with no bar.sync between; of one warp."""
    return a >> 42 == b >> 42, a >> 26 == b >> 26, (a ^ b) & 0x7E0 == 0


def _unordered(before: np.ndarray, now: np.ndarray) -> np.ndarray:
    """True where nothing orders `now` behind `before`: not the same thread, no barrier between."""
    program, no_barrier, warp = _compare(before, now)
    ordered = (before & 4095 == now & 4095) | (warp & (before >> 12 != now >> 12))
    return (before >= 0) & ~(program & (~no_barrier | ordered))


class Races:
    """The last readers and the last writer of each place, -1 where there was none."""

    def __init__(self, size: int):
        self.writer = np.full(size, -1, np.int64)
        self.readers = self.writer.copy()

    def read(self, at: np.ndarray, who: np.ndarray) -> np.ndarray:
        """Note a read of the places `at` [n, width] by `who` [n, 1]. Returns which of them no barrier orders."""
        bad = _unordered(self.writer[at], who)
        before = self.readers[at]
        program, no_barrier, warp = _compare(before, who)
        others = no_barrier & (before & 4095 != who & 4095)
        merged = np.where(others & (before >> 12 == who >> 12), who | _THREADS, who)
        merged = np.where(others & ~warp, who | _WARPS, merged)
        merged = np.where((before >= 0) & ~program, _PROGRAMS, merged)
        self.readers[at] = merged
        lost = self.readers[at] != merged  # several read this place at once: one is kept, the others are added
        if lost.any():
            at, merged = at[lost], merged[lost]
            kept = self.readers[at]
            program, _, warp = _compare(kept, merged)
            for which, bits in ((warp, _THREADS), (~warp, _WARPS), (~program, _PROGRAMS)):
                self.readers[at[which]] = kept[which] | bits
        return bad

    def write(self, at: np.ndarray, who: np.ndarray, changes: np.ndarray) -> np.ndarray:
        """Note a write of the places `at` [n, width] by `who` [n, 1]. Returns which of them no barrier orders.

        changes: [n], whether a write changes what is there; the same once more harms nobody.
        """
        bad = _unordered(self.readers[at], who) | (_unordered(self.writer[at], who) & changes[:, None])
        self.writer[at] = who
        return bad


class Space:
    """A memory: bytes, what may be done to each, and who did it."""

    def __init__(self, size: int, state: int = 0):
        self.bytes = np.full(size, NOT_WRITTEN, np.uint8)
        self.state = np.full(size, state, np.uint8)
        self.races = Races(size)


class Buffers(Space):
    """Global memory: the arrays of one call, each at an address of its own."""

    def __init__(self, sizes: list[int]):
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self._sizes = np.array(sizes, np.int64)
        super().__init__(sum(sizes))

    def address(self, buffer: int) -> int:
        return (buffer + 1) << _APART

    def number(self, addresses: np.ndarray) -> np.ndarray:
        """The numbers of the buffers that addresses are in."""
        return (addresses >> _APART) - 1

    def span(self, buffer: int, nbytes: int) -> slice:
        """The place of the first bytes of a buffer."""
        start = int(self._ends[buffer] - self._sizes[buffer])
        return slice(start, start + nbytes)

    def find(self, addresses: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """The places of addresses, and whether all `width` bytes there are one buffer's."""
        buffer, offset = self.number(addresses), addresses & (1 << _APART) - 1
        known = (buffer >= 0) & (buffer < len(self._sizes))
        buffer = np.where(known, buffer, 0)
        size = self._sizes[buffer]
        return self._ends[buffer] - size + offset, known & (offset + width <= size)


class Shared(Space):
    """The shared memory of the programs that run, `room` bytes each, and what is on its way to it and from it."""

    def __init__(self, size: int, programs: int):
        self.room = -(-max(size, 1) // 16) * 16
        size = programs * self.room
        super().__init__(size, WRITABLE)
        self.filling = np.zeros(size, bool)  # by cp.async
        self.reading = np.zeros(size, np.uint16)  # by asynchronous products
        self.unfenced = np.zeros(size, bool)  # written, and no fence.proxy.async since
