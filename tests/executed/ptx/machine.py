"""Programs of a grid, executed in lockstep: registers, control, and every access to memory with its checks.

A register is a numpy array over all threads of the programs that run at once, or a scalar where it is the same in all.
Where threads part, those that are behind go first, until they meet again; at an instruction that needs all threads of a
warp or of a program they wait for the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ptx import races
from ptx.asynchronous import Copies, Products
from ptx.call import Call
from ptx.listing import Listing
from ptx.memory import READABLE, WRITABLE, WRITTEN, Buffers, Shared, granules
from ptx.operands import SHARED_BASE, register_width
from ptx.statistics import Stats
from ptx.tensor_memory import TensorMemory
from ptx.violation import Violation

_ADDRESS = re.compile(r"\[\s*(.+?)\s*(?:\+\s*(-?\w+))?\s*\]$")


class Machine:
    """Runs programs of one call. `given` has the kernel's parameters by name; instructions work on the rest."""

    def __init__(
        self,
        call: Call,
        listing: Listing,
        buffers: Buffers,
        given: dict[str, np.ndarray],
        stats: Stats,
        *,
        first_wins: bool,
        allow_contended: bool,
    ):
        self.call, self.listing, self.buffers, self.given, self.stats = call, listing, buffers, given, stats
        self.first_wins, self.allow_contended = first_wins, allow_contended
        self.threads = listing.threads

    def fail(self, what: str, lanes: np.ndarray | None = None, **more: Any) -> None:
        """Raise a Violation at this instruction; `lanes` are the threads that it is about."""
        if lanes is not None and len(lanes):
            lane = int(lanes[0])
            what += f", program {self.program[lane]} thread {self.thread[lane]}"
            what += f" and {len(lanes) - 1} more" if len(lanes) > 1 else ""
        what += "".join(f", {name} {value}" for name, value in more.items())
        raise Violation(f"{self.call.name}: line {self.now.line}: {what}: {self.now.text}")

    # Control

    def run(self, first: int, count: int) -> None:
        """Execute the programs from `first` on, `count` of them.

        `waiting` has where the threads are that do not run now; `parked` which of these places need others to come.
        """
        self._reset(first, count)
        code, labels = self.listing.code, self.listing.labels
        waiting: dict[int, np.ndarray] = {}
        parked: set[int] = set()
        at, active, everyone = 0, np.ones(self.n, bool), True

        def wait_at(place, threads):
            waiting[place] = waiting[place] | threads if place in waiting else threads
            parked.discard(place)

        while True:
            if at in waiting:
                active = active | waiting.pop(at)
                parked.discard(at)
                everyone = bool(active.all())
            self.now = instruction = code[at]
            self.active = None if everyone else active
            leaves = instruction.op[0] in ("bra", "brx", "ret")
            if leaves:
                mask = self.mask()
                taken = active if mask is None else mask
                if instruction.op[0] == "bra" and taken.any():
                    wait_at(labels[instruction.args[0]], taken)
                elif instruction.op[0] == "brx":
                    self._part(instruction, taken, wait_at)
                if (rest := active & ~taken).any():
                    wait_at(at + 1, rest)
                if not waiting:
                    break
            elif not everyone and len(waiting) > len(parked) and self._lacks(instruction.together, active):
                wait_at(at, active)
                parked.add(at)
            else:
                self.stats.instructions += 1
                self.stats.issued += self._warps(self.active)
                instruction.run(self)
                at += 1
                continue
            at = min(waiting.keys() - parked, default=min(waiting))
            active = waiting.pop(at)
            parked.discard(at)
            everyone = bool(active.all())
        if self.copies.under_way or self.products.under_way or not self.tensor_memory.quiet:
            self.fail("the kernel ends with a copy or a product that nobody waited for, or with tensor memory")

    def _part(self, instruction: Any, taken: np.ndarray, wait_at: Callable[[int, np.ndarray], None]) -> None:
        """Send every thread to the label that its register chooses of the table."""
        register, *table = instruction.args
        chosen = np.broadcast_to(self.read_register(register), taken.shape)
        if (chosen[taken] >= len(table)).any():
            self.fail(f"a branch past the {len(table)} labels of its table", np.flatnonzero(taken))
        for i, label in enumerate(table):
            if (threads := taken & (chosen == i)).any():
                wait_at(self.listing.labels[label], threads)

    def _lacks(self, together: int, active: np.ndarray) -> bool:
        """True where of any `together` threads, 0 for those of a program, only some are there."""
        present = active.reshape(-1, together or self.threads)
        return bool((present.any(1) & ~present.all(1)).any())

    def _warps(self, active: np.ndarray | None) -> int:
        return self.n // 32 if active is None else int(active.reshape(-1, 32).any(1).sum())

    def _reset(self, first: int, count: int) -> None:
        self.programs, self.n = count, count * self.threads
        self.lane = np.arange(self.n)
        self.program = np.repeat(np.arange(first, first + count, dtype=np.uint32), self.threads)
        self.thread = np.tile(np.arange(self.threads, dtype=np.uint32), count)
        self.local = self.lane // self.threads  # the program's number among those that run
        self.barriers, self.warp_barriers = np.zeros(count, np.int64), np.zeros(self.n // 32, np.int64)
        self.shared = Shared(self.call.shared, count)
        self.unread: dict[str, str] = {}  # registers that may not be touched yet, and what must be waited for
        self.undefined: dict[str, int] = {}  # registers with bytes of what was never written, a bit for each byte
        self.held: dict[str, str] = {}  # likewise those that may be read, not written
        self.copies, self.products, self.tensor_memory = Copies(self), Products(self), TensorMemory(self)
        self.registers: dict[str, Any] = {"%tid.x": self.thread, "%ctaid.x": self.program}
        self.registers |= {"%ntid.x": np.uint32(self.threads), "%nctaid.x": np.uint32(self.call.grid[0])}
        for axis in "yz":
            self.registers |= {f"%tid.{axis}": np.uint32(0), f"%ctaid.{axis}": np.uint32(0)}
            self.registers |= {f"%ntid.{axis}": np.uint32(1), f"%nctaid.{axis}": np.uint32(1)}

    def mask(self) -> np.ndarray | None:
        """The threads that execute this instruction; None for all."""
        guard = self.now.guard
        if guard is None:
            return self.active
        predicate = self.read_register(guard[0])
        predicate = self.spread(~predicate if guard[1] else predicate)
        return predicate if self.active is None else predicate & self.active

    def lanes(self) -> np.ndarray:
        """The numbers of the threads that execute this instruction."""
        mask = self.mask()
        return self.lane if mask is None else np.flatnonzero(mask)

    def whole_warps(self, lanes: np.ndarray) -> None:
        """Fail if only some threads of a warp are there."""
        if len(lanes) != self.n:
            present = np.bincount(lanes // 32, minlength=self.n // 32)
            if ((present > 0) & (present < 32)).any():
                self.fail("only some threads of a warp get here", lanes)

    def whole_programs(self, lanes: np.ndarray) -> np.ndarray:
        """The programs that these threads are; fail if only some threads of one are there."""
        present = np.bincount(self.local[lanes], minlength=self.programs)
        if ((present > 0) & (present < self.threads)).any():
            self.fail("only some threads of the program get here", lanes)
        return present > 0

    # Registers

    def write_register(self, name: str, value: np.ndarray) -> None:
        """Write a register, checked, in the threads that execute this instruction; `_` is no register."""
        if name != "_":
            if name in self.unread or name in self.held:
                self.fail(f"{name} is written before {self.unread.get(name) or self.held[name]}")
            if self.now.op[0] != "mov":
                self.products.touched.add(name)
            self.set_register(name, value)

    def set_register(self, name: str, value: np.ndarray) -> None:
        """Write a register without a check."""
        mask = self.mask()
        if mask is not None:
            value = np.where(mask, value, self.registers[name] if name in self.registers else _nobodys(value))
        self.registers[name] = value
        self.undefined.pop(name, None)

    def write_bits(self, name: str, value: np.ndarray) -> None:
        """Write bits of any type into a register that may be wider."""
        if name == "_":
            return
        value = value if value.dtype == bool else value.view(f"u{value.dtype.itemsize}")
        width = register_width(name)
        if width and value.dtype.itemsize < width:
            value = value.astype(f"u{width}")
        self.write_register(name, value)

    def read_register(self, name: str) -> np.ndarray:
        if name not in self.registers:
            self.fail(f"{name} was never written")
        if name in self.unread:
            self.fail(f"{name} is read before {self.unread[name]}")
        if name in self.undefined:
            self.fail(f"{name} has bytes that were never written")
        return self.registers[name]

    def spread(self, value: Any) -> np.ndarray:
        """The value as an array over all threads."""
        return np.broadcast_to(value, (self.n,))

    # Memory

    def who(self, lanes: np.ndarray) -> np.ndarray:
        """The identities [lanes, 1] of threads, as `races` knows them."""
        local, warp = self.local[lanes], lanes // 32
        return races.identity(self.program[lanes], self.barriers[local], self.warp_barriers[warp], self.thread[lanes])[
            :, None
        ]

    def address(self, argument: str, dtype: type) -> np.ndarray:
        """The address [register + offset] in every thread: uint64 for global memory, int64 for shared."""
        match = _ADDRESS.match(argument)
        assert match is not None, argument
        base, offset = match[1], int(match[2] or "0", 0)
        if base[0] == "%":
            start = self.read_register(base)
        else:
            start = np.array(SHARED_BASE if base == "global_smem" else int(base, 0))
        return self.spread(start).astype(dtype) + dtype(offset % 2**64 if dtype is np.uint64 else offset)

    def in_global(self, addresses: np.ndarray, lanes: np.ndarray, width: int, what: str) -> np.ndarray:
        """The places in global memory of one access of each of these lanes, checked."""
        bad = addresses % np.uint64(width) != 0
        if bad.any():
            self.fail(
                f"{what} of {width} bytes at an address that is no multiple", lanes[bad], address=hex(addresses[bad][0])
            )
        at, good = self.buffers.find(addresses, width)
        if not good.all():
            self.fail(f"{what} outside every buffer", lanes[~good], address=hex(addresses[~good][0]))
        return at

    def in_shared(self, addresses: np.ndarray, lanes: np.ndarray, width: int, what: str) -> np.ndarray:
        """The places in shared memory of one access of each of these lanes, checked."""
        offset = addresses - SHARED_BASE
        bad = offset % width != 0
        if bad.any():
            self.fail(
                f"{what} of {width} bytes in shared memory at no multiple", lanes[bad], offset=int(offset[bad][0])
            )
        bad = (offset < 0) | (offset + width > self.call.shared)
        if bad.any():
            self.fail(
                f"{what} outside shared memory of {self.call.shared} bytes", lanes[bad], offset=int(offset[bad][0])
            )
        return offset + self.local[lanes] * self.shared.room

    def load_global(self, at: np.ndarray, lanes: np.ndarray, width: int, what: str) -> np.ndarray:
        """Load [lanes, width] bytes of global memory."""
        space, places = self.buffers.space, at[:, None] + np.arange(width)
        self._initialised(space, places, lanes, what)
        if (space.state[at] & WRITABLE).any():  # operands have no writers
            bad = space.races.read(granules(places), self.who(lanes))
            if bad.any():
                self.fail(f"{what} of what another thread writes, and no barrier between", lanes[bad])
        return space.bytes[places]

    def load_shared(self, at: np.ndarray, lanes: np.ndarray, width: int, what: str) -> np.ndarray:
        """Load [lanes, width] bytes of shared memory."""
        space, places = self.shared, at[:, None] + np.arange(width)
        cells = granules(places)
        self.check_quiet(cells, lanes, what)
        self._initialised(space, places, lanes, what)
        bad = space.races.read(cells, self.who(lanes))
        if bad.any():
            self.fail(f"{what} of what another thread writes, and no barrier between", lanes[bad])
        return space.bytes[places]

    def store_global(self, at: np.ndarray, lanes: np.ndarray, data: np.ndarray, what: str) -> None:
        """Store `data`, [lanes, width] bytes, to global memory."""
        space, places = self.buffers.space, at[:, None] + np.arange(data.shape[1])
        bad = (space.state[places] & WRITABLE == 0).any(1)
        if bad.any():
            self.fail(f"{what} to an operand", lanes[bad])
        self._store(space, places, lanes, data, what)

    def store_shared(self, at: np.ndarray, lanes: np.ndarray, data: np.ndarray, what: str) -> None:
        """Store `data`, [lanes, width] bytes, to shared memory."""
        places = at[:, None] + np.arange(data.shape[1])
        cells = granules(places)
        self.check_quiet(cells, lanes, what)
        self.shared.unfenced[cells] = True
        self._store(self.shared, places, lanes, data, what)

    def _initialised(self, space: Any, places: np.ndarray, lanes: np.ndarray, what: str) -> None:
        bad = (space.state[places] & READABLE == 0).any(1)
        if bad.any():
            self.fail(f"{what} of bytes that nobody wrote", lanes[bad])

    def check_quiet(self, cells: np.ndarray, lanes: np.ndarray, what: str) -> None:
        """Fail where something asynchronous is still at work on these granules of shared memory."""
        bad = self.shared.filling[cells].any(1)
        if bad.any():
            self.fail(f"{what} where cp.async may still be writing", lanes[bad])
        bad = self.shared.reading[cells].any(1)
        if "read" not in what and bad.any():
            self.fail(f"{what} where a product may still be reading", lanes[bad])

    def _store(self, space: Any, places: np.ndarray, lanes: np.ndarray, data: np.ndarray, what: str) -> None:
        changes = (space.bytes[places] != data).any(1)
        order = slice(None, None, -1 if self.first_wins else 1)
        # numpy takes the last of several; but a reversed view in its own order
        space.bytes[places[order].copy()] = data[order].copy()
        lost = (space.bytes[places] != data).any(1)
        if lost.any():
            self._contended(space, places, lanes, data, lost, what)
        space.state[places] |= READABLE | WRITTEN
        bad = space.races.write(granules(places), self.who(lanes), changes)
        if bad.any():
            self.fail(f"{what} where another thread reads or writes, and no barrier between", lanes[bad])

    def _contended(
        self, space: Any, places: np.ndarray, lanes: np.ndarray, data: np.ndarray, lost: np.ndarray, what: str
    ) -> None:
        """Judge several threads' different values for one place at once: `lost` are those whose value did not stay."""
        if not self.allow_contended:
            self.fail(f"{what} of different values by several threads at once", lanes[lost])
        dtype = np.float64 if self.now.op[-1].endswith("64") else np.float32
        if data.shape[1] % dtype().itemsize:
            self.fail(f"{what} of different values by several threads at once", lanes[lost])
        kept, wanted = (np.ascontiguousarray(v).view(dtype) for v in (space.bytes[places[lost]], data[lost]))
        if (np.abs(kept - wanted) > 1e-5 * np.nanmax(np.abs(wanted))).any():
            self.fail(f"{what} of different values by several threads at once", lanes[lost])
        self.stats.contended[self.now.line] += int(lost.sum())


def _nobodys(value: np.ndarray) -> np.ndarray:
    """The content of a register that was never written: all ones, a NaN."""
    dtype = np.asarray(value).dtype
    return np.bool_(True) if dtype.kind == "b" else np.array(-1).astype(dtype)
