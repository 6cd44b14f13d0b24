"""Races: the last readers and writers of each place, and whether an access is ordered behind theirs."""

from __future__ import annotations

import numpy as np

GRANULE = 1  # bytes that are kept apart

# A reader or writer is one number: its program from bit 42 on, the bar.syncs it had passed from 26 on, the
# bar.warp.syncs its warp had passed from 12 on, its thread below. In place of a thread of 0 to 1023:
_THREADS = 2048  # several of one warp; added to one of them
_WARPS = 4095  # several of several warps
_PROGRAMS = np.int64(2**63 - 1)  # of several programs

MOST = {"barriers": 1 << 16, "warp barriers": 1 << 14, "threads": 1 << 10}


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
    """The last readers and the last writer of each `GRANULE` of a space."""

    def __init__(self, size: int):
        self.writer = np.full(-(-size // GRANULE), -1, np.int64)
        self.readers = self.writer.copy()

    def read(self, at: np.ndarray, who: np.ndarray) -> np.ndarray:
        """Note a read of the granules `at` [n, granules] by `who` [n, 1]. Returns which of the n no barrier orders."""
        bad = _unordered(self.writer[at], who).any(1)
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
        """Note a write of the granules `at` [n, granules] by `who` [n, 1]. Returns which of the n no barrier orders.

        changes: [n], whether a write changes what is there; the same once more harms nobody.
        """
        bad = _unordered(self.readers[at], who) | (_unordered(self.writer[at], who) & changes[:, None])
        self.writer[at] = who
        return bad.any(1)

    def settle(self, at: np.ndarray, who: np.ndarray) -> None:
        """Note that what was written asynchronously counts from now on as written by `who`."""
        self.writer[at] = who
