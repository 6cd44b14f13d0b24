"""An executor of PTX on numpy arrays: a program that was lowered for an NVIDIA GPU runs without one.

    Program(f, *shapes).run(*arrays)

`f` is lowered for CUDA. From that text, which is what XLA's GPU compiler is given, comes each Triton call as it stands:
PTX, grid, warps, shared memory, operand order, scalars, aliases. This package executes their PTX; the rest of the text
is compiled by XLA for the CPU.

The files, in the order of reading: `call` (one Triton call), `program` (the lowered text; buffers in, buffers out),
`listing` (PTX as instructions), `machine` (programs of a grid in lockstep), `memory` (what may be touched, and in what
order), and the instructions, a file for each kind, with what threads must wait for.

A `Violation` names kernel, line and thread of what a GPU would let pass or punish at random:

  memory   a byte outside the operands and results, or of a result before it was written; an address that is not a
           multiple of the access; a store to an operand; a byte of a result that nobody wrote
  shared   the same for shared memory, and registers read before they are written
  order    two threads at one place, one of them writing, and no bar.sync between (there is none between programs of a
           grid); several threads that store different values to one place at once; a place that a copy or a wgmma may
           still be working on; a wgmma's sums before they are there; what was stored and then read by the asynchronous
           proxy without fence.proxy.async. A product of tcgen05 is done at once
  control  bar.sync, shfl, ldmatrix, mma and their kin that some of their threads do not reach

Arithmetic is PTX's, bit for bit, but for `approx` and `full` (computed exactly), a double rounding in fma, and the
order in which a matrix product is summed.
"""

from ptx.call import Call, Stats, Violation
from ptx.program import Program

__all__ = ["Call", "Program", "Stats", "Violation"]
