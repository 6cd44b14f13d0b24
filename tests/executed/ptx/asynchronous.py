"""Asynchronous work: the copies of cp.async and the products of wgmma, until they are waited for."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ptx.memory import READABLE, WRITTEN, granules


class _Copy(NamedTuple):
    """A copy: for each thread the place in shared memory, the bytes that come there, and the group."""

    lanes: np.ndarray
    at: np.ndarray
    data: np.ndarray
    group: np.ndarray


class Copies:
    """The copies of cp.async: bytes are taken from global memory at once, and arrive when their thread waits."""

    def __init__(self, machine: Any):
        self._machine = machine
        self._groups = np.zeros(machine.n, np.int64)  # that each thread has committed
        self.under_way: list[_Copy] = []

    def start(self, at: np.ndarray, lanes: np.ndarray, data: np.ndarray) -> None:
        m = self._machine
        places = granules(at[:, None] + np.arange(data.shape[1]))
        m.check_quiet(places, lanes, "a copy")
        bad = m.shared.races.write(places, m.who(lanes), np.ones(len(lanes), bool))
        if bad.any():
            m.fail("a copy to where another thread reads or writes, and no barrier between", lanes[bad])
        m.shared.filling[places] = True
        self.under_way.append(_Copy(lanes, at, data, self._groups[lanes]))

    def commit(self) -> None:
        mask = self._machine.mask()
        self._groups = self._groups + (1 if mask is None else mask)

    def wait(self, newest: int | None) -> None:
        """Let all but the `newest` groups arrive; with None also the copies that are not committed.

        They are there for the threads that wait; for others, behind the next barrier.
        """
        m = self._machine
        here = np.zeros(m.n, bool)
        here[m.lanes()] = True
        limit = self._groups + 1 if newest is None else self._groups - newest
        remaining = []
        for copy in self.under_way:
            done = (copy.group < limit[copy.lanes]) & here[copy.lanes]
            if done.any():
                self._arrive(copy.at[done], copy.lanes[done], copy.data[done])
            if not done.all():
                remaining.append(_Copy(*(a[~done] for a in copy)))
        self.under_way = remaining

    def _arrive(self, at: np.ndarray, lanes: np.ndarray, data: np.ndarray) -> None:
        shared = self._machine.shared
        places = at[:, None] + np.arange(data.shape[1])
        shared.bytes[places] = data
        shared.state[places] |= READABLE | WRITTEN
        shared.filling[granules(places)] = False
        shared.unfenced[granules(places)] = True
        shared.races.settle(granules(places), self._machine.who(lanes))


class _Product(NamedTuple):
    """One wgmma: its threads and their groups, the registers it uses, and what it reads of shared memory, by whom."""

    lanes: np.ndarray
    group: np.ndarray
    sums: set[str]
    factors: set[str]
    reads: list[tuple[np.ndarray, np.ndarray]]


class Products:
    """The products of wgmma: computed at once, but guarded until they are waited for.

    Until then nobody may touch their registers or change what they read.
    """

    def __init__(self, machine: Any):
        self._machine = machine
        self._groups = np.zeros(machine.n, np.int64)
        self.touched: set[str] = set()  # registers written since wgmma.fence, but by mov: LLVM's copies come behind it
        self._fenced = False  # since the last wgmma.wait_group
        self.under_way: list[_Product] = []

    def fence(self) -> None:
        self.touched, self._fenced = set(), True

    def start(self, sums: list[str], factors: list[str]) -> None:
        """Start a product. One after another may add to the same sums."""
        m = self._machine
        if not self._fenced:
            m.fail("no wgmma.fence before, or none since wgmma.wait_group")
        if touched := self.touched.intersection(sums + factors):
            m.fail(f"no wgmma.fence since {min(touched)} was written")

    def read(self, addresses: np.ndarray, lanes: np.ndarray, width: int) -> tuple[np.ndarray, Any]:
        """Read [n, width] bytes of shared memory, and note what was read, for `finish`."""
        m = self._machine
        at = m.in_shared(addresses, lanes, width, "a product's read")
        data = m.load_shared(at, lanes, width, "a product's read")
        places = granules(at[:, None] + np.arange(width))
        bad = m.shared.unfenced[places].any(1)
        if bad.any():
            m.fail("a product reads what was stored without fence.proxy.async", lanes[bad])
        np.add.at(m.shared.reading, places, 1)
        return data, (places, lanes)

    def finish(self, lanes: np.ndarray, sums: list[str], factors: list[str], reads: list[Any]) -> None:
        self.under_way.append(_Product(lanes, self._groups[lanes], set(sums), set(factors), reads))
        self._mark()

    def _mark(self) -> None:
        m, what = self._machine, "wgmma.wait_group"
        m.unread = {name: what for product in self.under_way for name in product.sums}
        m.held = {name: what for product in self.under_way for name in product.factors}

    def commit(self) -> None:
        mask = self._machine.mask()
        self._groups = self._groups + (1 if mask is None else mask)

    def wait(self, newest: int) -> None:
        """Finish all but the `newest` groups."""
        m = self._machine
        here = np.zeros(m.n, bool)
        here[m.lanes()] = True
        remaining = []
        for product in self.under_way:
            done = (product.group < self._groups[product.lanes] - newest) & here[product.lanes]
            if not done.all():
                remaining.append(product)
                continue
            for places, lanes in product.reads:
                np.subtract.at(m.shared.reading, places, 1)
                m.shared.races.read(places, m.who(lanes))  # it was read until now
        self.under_way = remaining
        self._fenced = bool(remaining)
        self._mark()
