"""Asynchronous work and its waits: barriers, fences, the copies of cp.async, and the products of wgmma under way."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ptx.memory import READABLE, WRITTEN
from ptx.operands import operand


class _Groups:
    """Work that threads start, commit in groups, and wait for."""

    def __init__(self, machine: Any):
        self._machine = machine
        self.groups = np.zeros(machine.n, np.int64)  # that each thread has committed
        self.under_way: list[Any] = []

    def commit(self) -> None:
        mask = self._machine.mask()
        self.groups = self.groups + (1 if mask is None else mask)

    def done(self, work: Any, newest: int) -> np.ndarray:
        """True for those threads of the work that wait now for all but the `newest` groups, of which it is none."""
        here = np.zeros(self._machine.n, bool)
        here[self._machine.lanes()] = True
        return here[work.lanes] & (work.group < self.groups[work.lanes] - newest)


class _Copy(NamedTuple):
    """A copy: for each thread its group, the places in shared memory, and the bytes that come there."""

    lanes: np.ndarray
    group: np.ndarray
    places: np.ndarray
    data: np.ndarray


class Copies(_Groups):
    """The copies of cp.async: bytes are taken from global memory at once, and arrive when their thread waits."""

    def start(self, places: np.ndarray, lanes: np.ndarray, data: np.ndarray) -> None:
        m = self._machine
        m.check_quiet(places, lanes, "a copy")
        bad = m.shared.races.write(places, m.who(lanes), np.ones(len(lanes), bool))
        m.refuse(bad, lanes, "a copy to where another thread reads or writes, and no barrier between")
        m.shared.filling[places] = True
        self.under_way.append(_Copy(lanes, self.groups[lanes], places, data))

    def wait(self, newest: int) -> None:
        """Let all but the `newest` groups arrive: for the threads that wait; for others, behind the next barrier."""
        shared, remaining = self._machine.shared, []
        for copy in self.under_way:
            done = self.done(copy, newest)
            lanes, _, places, data = (a[done] for a in copy)
            shared.bytes[places] = data
            shared.state[places] |= READABLE | WRITTEN
            shared.filling[places] = False
            shared.unfenced[places] = True
            shared.races.writer[places] = self._machine.who(lanes)
            if not done.all():
                remaining.append(_Copy(*(a[~done] for a in copy)))
        self.under_way = remaining


class _Product(NamedTuple):
    """One wgmma: its threads and their groups, the registers it uses, and what it reads of shared memory, by whom."""

    lanes: np.ndarray
    group: np.ndarray
    sums: list[str]
    factors: list[str]
    reads: list[tuple[np.ndarray, np.ndarray]]


class Products(_Groups):
    """The products of wgmma: computed at once, but guarded until they are waited for.

    Until then nobody may touch their registers or change what they read.
    """

    def __init__(self, machine: Any):
        super().__init__(machine)
        self.touched: set[str] = set()  # registers written since wgmma.fence, but by mov: LLVM's copies come behind it
        self._fenced = False  # since the last wgmma.wait_group

    def fence(self) -> None:
        self.touched, self._fenced = set(), True

    def start(self, sums: list[str], factors: list[str]) -> None:
        """Start a product. One after another may add to the same sums."""
        if not self._fenced:
            self._machine.fail("no wgmma.fence before, or none since wgmma.wait_group")
        if touched := self.touched.intersection(sums + factors):
            self._machine.fail(f"no wgmma.fence since {min(touched)} was written")

    def read(self, addresses: np.ndarray, lanes: np.ndarray, width: int) -> tuple[np.ndarray, Any]:
        """Read [n, width] bytes of shared memory, and note what was read, for `finish`."""
        m = self._machine
        places = m.shared_places(addresses, lanes, width, "a product's read")
        data = m.load(m.shared, places, lanes, "a product's read")
        m.refuse(m.shared.unfenced[places], lanes, "a product reads what was stored without fence.proxy.async")
        return data, (places, lanes)

    def finish(self, lanes: np.ndarray, sums: list[str], factors: list[str], reads: list[Any]) -> None:
        for places, _ in reads:
            np.add.at(self._machine.shared.reading, places, 1)
        self.under_way.append(_Product(lanes, self.groups[lanes], sums, factors, reads))
        self._mark()

    def _mark(self) -> None:
        m, what = self._machine, "wgmma.wait_group"
        m.unread = {name: what for product in self.under_way for name in product.sums}
        m.held = {name: what for product in self.under_way for name in product.factors}

    def wait(self, newest: int) -> None:
        """Finish all but the `newest` groups."""
        m, remaining = self._machine, []
        for product in self.under_way:
            if not self.done(product, newest).all():
                remaining.append(product)
                continue
            for places, lanes in product.reads:
                np.subtract.at(m.shared.reading, places, 1)
                m.shared.races.read(places, m.who(lanes))  # it was read until now
        self.under_way = remaining
        self._fenced = bool(remaining)
        self._mark()


def _cp(i: Any):
    if i.op[2] == "commit_group":
        return lambda m: m.copies.commit()
    if i.op[2] == "wait_group":
        return lambda m: m.copies.wait(int(i.args[0], 0))
    if i.op[1] != "async" or i.op[3:] != ["shared", "global"]:
        raise NotImplementedError(i.text)
    width = int(i.args[2], 0)
    wanted = operand(i.args[3], "u32") if len(i.args) > 3 else lambda m: np.uint32(width)

    def run(m):
        lanes = m.lanes()
        data, size = np.zeros((len(lanes), width), np.uint8), m.spread(wanted(m))[lanes]
        if not np.isin(size, (0, width)).all():
            raise NotImplementedError("a part of a copy")
        places = m.in_shared(i.args[0], lanes, width, "a copy")
        some = size > 0  # the others are filled with zeros
        data[some] = m.load_global(i.args[1], lanes[some], width, "a copy")
        m.copies.start(places, lanes, data)

    return run


def _bar(i):
    if i.op[1] == "warp":
        return _bar_warp
    if i.args not in (["0"], ["0x0"]):  # one barrier, of all threads
        raise NotImplementedError(i.text)

    def run(m):
        m.barriers += m.whole_programs()

    return run


def _bar_warp(m):
    m.warp_barriers[m.whole_warps()[::32] // 32] += 1


def _fence(i):
    """The fence.proxy.async, behind which what these threads wrote to shared memory may be read asynchronously."""
    if i.op[1:3] != ["proxy", "async"]:
        raise NotImplementedError(i.text)

    def run(m):
        m.shared.unfenced.reshape(m.programs, -1)[m.whole_programs()] = False

    return run


TABLE = {"cp": _cp, "bar": _bar, "barrier": _bar, "fence": _fence}
TABLE |= dict.fromkeys(("bra", "brx", "ret"), lambda i: lambda m: None)  # the machine's own
