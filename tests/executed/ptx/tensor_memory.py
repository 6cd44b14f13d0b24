"""The tensor memory of sm_100: 128 lanes of 32-bit columns, their users, and the barriers that products arrive at."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ptx.races import GRANULE, Races

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
        self._columns = 0  # 0: nothing is allocated
        self._phases: dict[int, np.ndarray] = {}  # {place of an mbarrier in shared memory: phases of each program}
        self._products: list[_Product] = []
        self._loads: list[tuple[np.ndarray, np.ndarray]] = []  # (threads, cells) that tcgen05.wait::ld lacks

    @property
    def quiet(self) -> bool:
        """True where all of it was given back."""
        return not self._columns

    def allocate(self, columns: int, lanes: np.ndarray) -> int:
        """Allocate columns and return the address."""
        m = self._machine
        if len(lanes) != 32 * m.programs:
            raise NotImplementedError("tensor memory for some programs only")
        if self._columns:
            raise NotImplementedError("a second allocation of tensor memory")
        self._columns, cells = columns, m.programs * LANES * columns
        self.bits = np.full(cells, 0xFFFFFFFF, np.uint32)  # NaN
        self._written = np.zeros(cells, bool)
        self._storing = np.zeros(cells, bool)  # no tcgen05.wait::st yet
        self._filling = np.zeros(cells, bool)  # by a product
        self._reading = np.zeros(cells, bool)
        self._races = Races(cells * GRANULE)
        return _FIRST_COLUMN

    def free(self, address: np.ndarray, columns: int) -> None:
        if (address != _FIRST_COLUMN).any() or columns != self._columns:
            self._machine.fail(f"no {columns} columns were allocated here")
        if self._products or self._loads:
            self._machine.fail("tensor memory is given back while a product or a load may still be at work on it")
        self._columns = 0

    def cells(self, programs: np.ndarray, lane: np.ndarray, column: np.ndarray) -> np.ndarray:
        """The numbers of cells; arrays that broadcast together, `column` counted as addresses count."""
        column = column - _FIRST_COLUMN
        if ((column < 0) | (column >= self._columns) | (lane >= LANES)).any():
            self._machine.fail(f"outside the {self._columns} columns of tensor memory that are allocated")
        return (programs * LANES + lane) * self._columns + column

    # Threads of a warp

    def load(self, cells: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """Load [threads, cells] values. Nobody may change them before `wait_loads`.

        PTX leaves open what is in the registers until then. That is not checked: LLVM puts Triton's arithmetic in front
        of the wait, and ptxas the wait in front of the arithmetic again (seen in its code for sm_100).
        """
        m = self._machine
        self._check(cells, lanes, "a read")
        if (bad := ~self._written[cells].all(1)).any():
            m.fail("a read of tensor memory that nobody wrote", lanes[bad])
        if (bad := self._races.read(cells, m.who(lanes))).any():
            m.fail("a read of tensor memory that another thread writes, and no barrier between", lanes[bad])
        self._reading[cells] = True
        self._loads.append((lanes, cells))
        return self.bits[cells]

    def wait_loads(self) -> None:
        here, remaining = self._machine.lanes(), []
        for lanes, cells in self._loads:
            if np.isin(lanes, here).all():
                self._reading[cells] = False
            else:
                remaining.append((lanes, cells))
        self._loads = remaining

    def store(self, cells: np.ndarray, lanes: np.ndarray, values: np.ndarray) -> None:
        m = self._machine
        self._check(cells, lanes, "a write")
        changes = (self.bits[cells] != values).any(1)
        self.bits[cells] = values
        self._written[cells] = self._storing[cells] = True
        if (bad := self._races.write(cells, m.who(lanes), changes)).any():
            m.fail("a write of tensor memory where another thread reads or writes, and no barrier between", lanes[bad])

    def wait_stores(self) -> None:
        warps = np.unique(self._machine.lanes() // 32)
        cells = np.flatnonzero(self._storing)
        warp = self._races.writer[cells] & 1023
        program = cells // (LANES * self._columns)
        self._storing[cells[np.isin(program * (self._machine.threads // 32) + warp // 32, warps)]] = False

    def _check(self, cells: np.ndarray, lanes: np.ndarray, what: str) -> None:
        bad = self._filling[cells] | (self._reading[cells] & (what == "a write"))
        if bad.any():
            self._machine.fail(
                f"{what} of tensor memory that a product or a load may still be at work on", lanes[bad.any(1)]
            )

    # Products

    def factors(self, cells: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """Read a product's operand: [lanes, cells] by one thread of each program."""
        m = self._machine
        if self._storing[cells].any():
            m.fail("a product reads tensor memory before tcgen05.wait::st")
        if not self._written[cells].all():
            m.fail("a product reads tensor memory that nobody wrote")
        if self._races.read(cells, m.who(lanes)).any():
            m.fail("a product reads tensor memory that another thread writes, and no barrier between")
        return self.bits[cells]

    def multiply(
        self,
        lanes: np.ndarray,
        sums: np.ndarray,
        values: np.ndarray,
        factors: np.ndarray | None,
        reads: list[tuple[np.ndarray, np.ndarray]],
    ) -> None:
        """Write a product: computed at once, but nobody may touch it until its mbarrier was waited for."""
        m = self._machine
        if self._races.write(sums, m.who(lanes), np.ones(len(lanes), bool)).any():
            m.fail("a product writes tensor memory where another thread reads or writes, and no barrier between", lanes)
        if self._reading[sums].any():
            m.fail("a product writes tensor memory that may still be being read", lanes)
        self.bits[sums] = values
        self._written[sums] = self._filling[sums] = True
        if factors is not None:
            self._reading[factors] = True
        self._products.append(_Product(m.local[lanes], None, sums, factors, reads))

    def commit(self, barrier: int, lanes: np.ndarray) -> None:
        """Let the products so far arrive at this mbarrier, which thereby completes a phase."""
        m = self._machine
        programs = m.local[lanes]
        if barrier not in self._phases or (self._phases[barrier][programs] < 0).any():
            m.fail("there is no mbarrier", lanes)
        self._products = [p if p.barrier is not None else p._replace(barrier=barrier) for p in self._products]
        self._phases[barrier][programs] += 1

    def start_barrier(self, barrier: int, lanes: np.ndarray) -> None:
        m = self._machine
        self._phases.setdefault(barrier, np.full(m.programs, -1))[m.local[lanes]] = 0

    def end_barrier(self, barrier: int, lanes: np.ndarray) -> None:
        if barrier in self._phases:
            self._phases[barrier][self._machine.local[lanes]] = -1

    def passed(self, barrier: int, parity: np.ndarray, lanes: np.ndarray) -> None:
        """Let these threads wait for the phase of this parity. Then the products that arrived are there for all."""
        m = self._machine
        programs = m.local[lanes]
        phase = self._phases.get(barrier, np.full(m.programs, -1))[programs]
        if (bad := (phase < 0) | (phase & 1 == parity)).any():
            m.fail("waits for ever", lanes[bad])
        everyone = m.whole_programs(lanes)
        remaining = []
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
