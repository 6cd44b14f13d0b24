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

from ptx.asynchronous import Copies, Products
from ptx.call import Call, Stats, Violation
from ptx.listing import Listing
from ptx.memory import READABLE, WRITABLE, WRITTEN, Buffers, Shared, Space, identity
from ptx.operands import SHARED_BASE, register_width
from ptx.tcgen05 import TensorMemory

_ADDRESS = re.compile(r"\[\s*(.+?)\s*(?:\+\s*(-?\w+))?\s*\]$")


class Machine:
    """Runs programs of one call. `given` has the kernel's parameters by name; instructions work on the rest."""

    def __init__(self, call: Call, listing: Listing, buffers: Buffers, given: dict[str, np.ndarray], stats: Stats):
        self.call, self.listing, self.buffers, self.given, self.stats = call, listing, buffers, given, stats
        self.threads = listing.threads

    def fail(self, what: str, lanes: np.ndarray | None = None) -> None:
        """Raise a Violation at this instruction; `lanes` are the threads that it is about."""
        if lanes is not None and len(lanes):
            what += f", program {self.program[lanes[0]]} thread {self.thread[lanes[0]]}"
            what += f" and {len(lanes) - 1} more" if len(lanes) > 1 else ""
        raise Violation(f"{self.call.name}: line {self.now.line}: {what}: {self.now.text}")

    def refuse(self, bad: np.ndarray, lanes: np.ndarray, what: str) -> None:
        """Fail if any of `bad`, [lanes] or [lanes, width], is True."""
        if bad.any():
            self.fail(what, lanes[bad.reshape(len(lanes), -1).any(1)])

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
            if instruction.op[0] in ("bra", "brx", "ret"):
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
                self.stats.issued += self.n // 32 if everyone else int(active.reshape(-1, 32).any(1).sum())
                instruction.run(self)
                at += 1
                continue
            at = min(waiting.keys() - parked, default=min(waiting))
            active = waiting.pop(at)
            parked.discard(at)
            everyone = bool(active.all())
        if self.copies.under_way or self.products.under_way or self.tensor_memory.columns:
            self.fail("the kernel ends with a copy or a product that nobody waited for, or with tensor memory")

    def _part(self, instruction: Any, taken: np.ndarray, wait_at: Callable[[int, np.ndarray], None]) -> None:
        """Send every thread to the label that its register chooses of the table."""
        register, *table = instruction.args
        chosen = self.spread(self.read_register(register))
        if (chosen[taken] >= len(table)).any():
            self.fail(f"a branch past the {len(table)} labels of its table", np.flatnonzero(taken))
        for i, label in enumerate(table):
            if (threads := taken & (chosen == i)).any():
                wait_at(self.listing.labels[label], threads)

    def _lacks(self, together: int, active: np.ndarray) -> bool:
        """True where of any `together` threads, 0 for those of a program, only some are there."""
        present = active.reshape(-1, together or self.threads)
        return bool((present.any(1) & ~present.all(1)).any())

    def _reset(self, first: int, count: int) -> None:
        self.programs, self.n = count, count * self.threads
        self.lane = np.arange(self.n)
        self.program = np.repeat(np.arange(first, first + count, dtype=np.uint32), self.threads)
        self.thread = np.tile(np.arange(self.threads, dtype=np.uint32), count)
        self.local = self.lane // self.threads  # the program's number among those that run
        self.barriers, self.warp_barriers = np.zeros(count, np.int64), np.zeros(self.n // 32, np.int64)
        self.shared = Shared(self.call.shared, count)
        self.unread: dict[str, str] = {}  # registers that may not be touched yet, and what must be waited for
        self.held: dict[str, str] = {}  # likewise those that may be read, not written
        self.copies, self.products, self.tensor_memory = Copies(self), Products(self), TensorMemory(self)
        self.registers: dict[str, Any] = {"%tid.x": self.thread, "%ctaid.x": self.program}
        self.registers |= {"%ntid.x": np.uint32(self.threads), "%nctaid.x": np.uint32(self.call.grid)}

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

    def whole(self, size: int, what: str) -> np.ndarray:
        """The threads that execute this instruction; fail if of any `size` of them only some do."""
        lanes = self.lanes()
        if len(lanes) != self.n:
            present = np.bincount(lanes // size, minlength=self.n // size)
            if ((present > 0) & (present < size)).any():
                self.fail(f"only some threads of {what} get here", lanes)
        return lanes

    def whole_warps(self) -> np.ndarray:
        return self.whole(32, "a warp")

    def whole_programs(self) -> np.ndarray:
        """The programs whose threads execute this instruction, as a mask."""
        lanes = self.whole(self.threads, "the program")
        return np.bincount(self.local[lanes], minlength=self.programs) > 0

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
            # A register that was never written is all ones, a NaN.
            before = self.registers[name] if name in self.registers else ~np.zeros_like(value)
            value = np.where(mask, value, before)
        self.registers[name] = value

    def write_bits(self, name: str, value: np.ndarray) -> None:
        """Write bits of any type into a register that may be wider."""
        if name == "_":
            return
        value = value if value.dtype == bool else value.view(f"u{value.dtype.itemsize}")
        width = register_width(name)
        if width and value.dtype.itemsize < width:
            value = value.astype(f"u{width}")
        self.write_register(name, value)

    def write_some(self, name: str, lanes: np.ndarray, values: np.ndarray) -> None:
        """Write bits [lanes] into a register of these threads."""
        whole = np.zeros(self.n, values.dtype)
        whole[lanes] = values
        self.write_bits(name, whole)

    def read_register(self, name: str) -> np.ndarray:
        if name not in self.registers:
            self.fail(f"{name} was never written")
        if name in self.unread:
            self.fail(f"{name} is read before {self.unread[name]}")
        return self.registers[name]

    def spread(self, value: Any) -> np.ndarray:
        """The value as an array over all threads."""
        return np.broadcast_to(value, (self.n,))

    # Memory

    def who(self, lanes: np.ndarray) -> np.ndarray:
        """The identities [lanes, 1] of threads, as `Races` knows them."""
        barriers, warp_barriers = self.barriers[self.local[lanes]], self.warp_barriers[lanes // 32]
        return identity(self.program[lanes], barriers, warp_barriers, self.thread[lanes])[:, None]

    def address(self, argument: str, lanes: np.ndarray) -> np.ndarray:
        """The address [register + offset] in each of these threads."""
        match = _ADDRESS.match(argument)
        assert match is not None, argument
        base, offset = match[1], int(match[2] or "0", 0)
        start = self.read_register(base) if base[0] == "%" else SHARED_BASE if base == "global_smem" else int(base, 0)
        return self.spread(start)[lanes].astype(np.int64) + offset

    def in_global(self, argument: str, lanes: np.ndarray, width: int, what: str) -> tuple[np.ndarray, np.ndarray]:
        """The addresses [lanes] and places [lanes, width] in global memory of one access of each lane, checked."""
        addresses = self.address(argument, lanes)
        self.refuse(addresses % width != 0, lanes, f"{what} of {width} bytes at an address that is no multiple")
        at, good = self.buffers.find(addresses, width)
        self.refuse(~good, lanes, f"{what} outside every buffer")
        return addresses, at[:, None] + np.arange(width)

    def in_shared(self, argument: str, lanes: np.ndarray, width: int, what: str) -> np.ndarray:
        """The places [lanes, width] in shared memory of one access of each of these lanes, checked."""
        return self.shared_places(self.address(argument, lanes), lanes, width, what)

    def shared_places(self, addresses: np.ndarray, lanes: np.ndarray, width: int, what: str) -> np.ndarray:
        offset = addresses - SHARED_BASE
        self.refuse(offset % width != 0, lanes, f"{what} of {width} bytes in shared memory at no multiple")
        bad = (offset < 0) | (offset + width > self.call.shared)
        self.refuse(bad, lanes, f"{what} outside shared memory of {self.call.shared} bytes")
        return (offset + self.local[lanes] * self.shared.room)[:, None] + np.arange(width)

    def load_global(self, argument: str, lanes: np.ndarray, width: int, what: str) -> np.ndarray:
        """Load [lanes, width] bytes of global memory."""
        addresses, places = self.in_global(argument, lanes, width, what)
        self._count("read", addresses, lanes, width)
        return self.load(self.buffers, places, lanes, what)

    def store_global(self, argument: str, lanes: np.ndarray, data: np.ndarray, what: str) -> None:
        """Store [lanes, width] bytes to global memory."""
        addresses, places = self.in_global(argument, lanes, data.shape[1], what)
        self._count("written", addresses, lanes, data.shape[1])
        self.store(self.buffers, places, lanes, data, what)

    def _count(self, kind: str, addresses: np.ndarray, lanes: np.ndarray, width: int) -> None:
        if len(lanes):
            rows = np.full(self.n, -1)
            rows[lanes] = addresses
            self.stats.count(kind, int(self.buffers.number(addresses[0])), rows.reshape(-1, 32), width)

    def load(self, space: Space, places: np.ndarray, lanes: np.ndarray, what: str) -> np.ndarray:
        """Load the bytes [lanes, width] at these places."""
        if space is self.shared:
            self.check_quiet(places, lanes, what)
        state = space.state[places]
        self.refuse(state & READABLE == 0, lanes, f"{what} of bytes that nobody wrote")
        if (state & WRITABLE).any():  # operands have no writers
            bad = space.races.read(places, self.who(lanes))
            self.refuse(bad, lanes, f"{what} of what another thread writes, and no barrier between")
        return space.bytes[places]

    def store(self, space: Space, places: np.ndarray, lanes: np.ndarray, data: np.ndarray, what: str) -> None:
        """Store the bytes [lanes, width] to these places."""
        if space is self.shared:
            self.check_quiet(places, lanes, what)
            self.shared.unfenced[places] = True
        self.refuse(space.state[places] & WRITABLE == 0, lanes, f"{what} to an operand")
        changes = (space.bytes[places] != data).any(1)
        space.bytes[places] = data
        self.refuse(space.bytes[places] != data, lanes, f"{what} of different values by several threads at once")
        space.state[places] |= READABLE | WRITTEN
        bad = space.races.write(places, self.who(lanes), changes)
        self.refuse(bad, lanes, f"{what} where another thread reads or writes, and no barrier between")

    def check_quiet(self, places: np.ndarray, lanes: np.ndarray, what: str) -> None:
        """Fail where something asynchronous is still at work on these places of shared memory."""
        self.refuse(self.shared.filling[places], lanes, f"{what} where cp.async may still be writing")
        if "read" not in what:
            self.refuse(self.shared.reading[places] > 0, lanes, f"{what} where a product may still be reading")
