"""The tensor memory of sm_100: 128 lanes of 32-bit columns, their users, and the barriers that products arrive at."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ptx.memory import Races

LANES = 128
_FIRST_COLUMN = 128  # where the only allocation lies; hardware chooses


class _Product(NamedTuple):
    """One tcgen05.mma: programs, the barrier that it arrives at, cells written, cells and shared memory read."""

    programs: np.ndarray
    barrier: int | None
    sums: np.ndarray
    factors: np.ndarray | None
    reads: list[tuple[np.ndarray, np.ndarray]]


class TensorMemory:
    """The tensor memory of the programs that run. Cells are numbered through: program, lane, column."""

    def __init__(self, machine: Any):
        self._machine = machine
        self.columns = 0  # 0: nothing is allocated
        self._phases: dict[int, np.ndarray] = {}  # {place of an mbarrier in shared memory: phases of each program}
        self._products: list[_Product] = []
        self._loads: list[tuple[np.ndarray, np.ndarray]] = []  # (threads, cells) that tcgen05.wait::ld lacks

    def allocate(self, columns: int, lanes: np.ndarray) -> int:
        """Allocate columns and return the address."""
        m = self._machine
        if len(lanes) != 32 * m.programs or self.columns:
            raise NotImplementedError("tensor memory for some programs only, or a second allocation")
        self.columns, cells = columns, m.programs * LANES * columns
        self.bits = np.full(cells, 0xFFFFFFFF, np.uint32)  # NaN
        self._written = np.zeros(cells, bool)
        self._storing = np.zeros(cells, bool)  # no tcgen05.wait::st yet
        self._filling = np.zeros(cells, bool)  # by a product
        self._reading = np.zeros(cells, bool)
        self._races = Races(cells)
        return _FIRST_COLUMN

    def free(self, address: np.ndarray, columns: int) -> None:
        if (address != _FIRST_COLUMN).any() or columns != self.columns:
            self._machine.fail(f"no {columns} columns were allocated here")
        if self._products or self._loads:
            self._machine.fail("tensor memory is given back while a product or a load may still be at work on it")
        self.columns = 0

    def cells(self, programs: np.ndarray, lane: np.ndarray, column: np.ndarray) -> np.ndarray:
        """The numbers of cells; arrays that broadcast together, `column` counted as addresses count."""
        column = column - _FIRST_COLUMN
        if ((column < 0) | (column >= self.columns) | (lane >= LANES)).any():
            self._machine.fail(f"outside the {self.columns} columns of tensor memory that are allocated")
        return (programs * LANES + lane) * self.columns + column

    # Threads of a warp

    def load(self, cells: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """Load [threads, cells] values. Nobody may change them before `wait_loads`.

        PTX leaves open what is in the registers until then. That is not checked: LLVM puts Triton's arithmetic in front
        of the wait, and ptxas the wait in front of the arithmetic again (seen in its code for sm_100).
        """
        m = self._machine
        m.refuse(self._filling[cells], lanes, "a read of tensor memory that a product may still be at work on")
        values = self._read(cells, lanes, "a read")
        self._reading[cells] = True
        self._loads.append((lanes, cells))
        return values

    def _read(self, cells: np.ndarray, lanes: np.ndarray, what: str) -> np.ndarray:
        m = self._machine
        m.refuse(~self._written[cells], lanes, f"{what} of tensor memory that nobody wrote")
        bad = self._races.read(cells, m.who(lanes))
        m.refuse(bad, lanes, f"{what} of tensor memory that another thread writes, and no barrier between")
        return self.bits[cells]

    def _write(self, cells: np.ndarray, lanes: np.ndarray, values: np.ndarray, changes: np.ndarray, what: str) -> None:
        m = self._machine
        m.refuse(self._reading[cells], lanes, f"{what} of tensor memory that may still be being read")
        bad = self._races.write(cells, m.who(lanes), changes)
        m.refuse(bad, lanes, f"{what} of tensor memory where another thread reads or writes, and no barrier between")
        self.bits[cells] = values
        self._written[cells] = True

    def wait_loads(self) -> None:
        here, remaining = self._machine.lanes(), []
        for lanes, cells in self._loads:
            if np.isin(lanes, here).all():
                self._reading[cells] = False
            else:
                remaining.append((lanes, cells))
        self._loads = remaining

    def store(self, cells: np.ndarray, lanes: np.ndarray, values: np.ndarray) -> None:
        what = "a write of tensor memory that a product may still be at work on"
        self._machine.refuse(self._filling[cells], lanes, what)
        self._write(cells, lanes, values, (self.bits[cells] != values).any(1), "a write")
        self._storing[cells] = True

    def wait_stores(self) -> None:
        m = self._machine
        cells = np.flatnonzero(self._storing)
        lanes = cells // (LANES * self.columns) * m.threads + (self._races.writer[cells] & 1023)
        self._storing[cells[np.isin(lanes // 32, np.unique(m.lanes() // 32))]] = False

    # Products

    def factors(self, cells: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """Read a product's operand: [lanes, cells] by one thread of each program."""
        self._machine.refuse(self._storing[cells], lanes, "a product reads tensor memory before tcgen05.wait::st")
        return self._read(cells, lanes, "a product's read")

    def multiply(
        self,
        lanes: np.ndarray,
        sums: np.ndarray,
        values: np.ndarray,
        factors: np.ndarray | None,
        reads: list[tuple[np.ndarray, np.ndarray]],
    ) -> None:
        """Write a product: computed at once, but nobody may touch it until its mbarrier was waited for."""
        self._write(sums, lanes, values, np.ones(len(lanes), bool), "a product's write")
        self._filling[sums] = True
        if factors is not None:
            self._reading[factors] = True
        self._products.append(_Product(self._machine.local[lanes], None, sums, factors, reads))

    def commit(self, barrier: int, lanes: np.ndarray) -> None:
        """Let the products so far arrive at this mbarrier, which thereby completes a phase."""
        programs = self._machine.local[lanes]
        self._machine.refuse(self._phase(barrier)[programs] < 0, lanes, "there is no mbarrier")
        self._products = [p if p.barrier is not None else p._replace(barrier=barrier) for p in self._products]
        self._phases[barrier][programs] += 1

    def _phase(self, barrier: int) -> np.ndarray:
        """The phase of each program's mbarrier, -1 where there is none."""
        return self._phases.setdefault(barrier, np.full(self._machine.programs, -1))

    def set_barrier(self, barrier: int, lanes: np.ndarray, phase: int) -> None:
        """Begin an mbarrier with phase 0, or end it with -1."""
        self._phase(barrier)[self._machine.local[lanes]] = phase

    def passed(self, barrier: int, parity: np.ndarray, lanes: np.ndarray) -> None:
        """Let these threads wait for the phase of this parity. Then the products that arrived are there for all."""
        m = self._machine
        phase = self._phase(barrier)[m.local[lanes]]
        m.refuse((phase < 0) | (phase & 1 == parity), lanes, "waits for ever")
        everyone, remaining = m.whole_programs(), []
        for product in self._products:
            if product.barrier != barrier or not everyone[product.programs].all():
                remaining.append(product)
                continue
            self._filling[product.sums] = False
            self._races.writer[product.sums] = -1  # every thread has waited: nobody needs another barrier
            if product.factors is not None:
                self._reading[product.factors] = False
            for places, _ in product.reads:
                np.subtract.at(m.shared.reading, places, 1)
        self._products = remaining
