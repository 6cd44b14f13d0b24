"""Synchronisation: bar, fence, and the ends of a thread."""

from __future__ import annotations

from typing import Any


def _bar(i: Any):
    if i.op[1] == "warp":
        return _bar_warp
    if i.args not in (["0"], ["0x0"]):  # one barrier, of all threads
        raise NotImplementedError(i.text)

    def run(m):
        m.barriers += m.whole_programs(m.lanes())

    return run


def _bar_warp(m):
    lanes = m.lanes()
    m.whole_warps(lanes)
    m.warp_barriers[lanes[::32] // 32] += 1


def _fence(i):
    """The instruction fence.proxy.async.

    What these threads wrote to shared memory may from now on be read asynchronously.
    """
    if i.op[1:3] != ["proxy", "async"]:
        raise NotImplementedError(i.text)

    def run(m):
        m.shared.unfenced.reshape(m.programs, -1)[m.whole_programs(m.lanes())] = False

    return run


def _trap(i):
    def run(m):
        if len(lanes := m.lanes()):
            m.fail("a trap", lanes)

    return run


def _control(i):
    """A branch, which is the machine's own."""
    return lambda m: None


TABLE = {"bar": _bar, "barrier": _bar, "fence": _fence, "trap": _trap}
TABLE |= dict.fromkeys(("bra", "brx", "ret"), _control)
