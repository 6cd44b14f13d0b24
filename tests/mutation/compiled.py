"""Ways to break what only executed kernels show: what the interpreter lets pass, and what it does not run."""

import targets as t
from targets import Mutant

PTXAS, TARGET, TILE = "jln/_triton/ptxas.py", "jln/_triton/target.py", "jln/_triton/tile.py"
ASSEMBLED = "tests/program/test_ptxas.py::"

COMPILED = [
    # Reads outside of an array whose values nobody uses.
    Mutant("offset read beyond its end", t.TERMS, "tl.load(offset_ptr + column, mask=exists, other=0.0)",
           "tl.load(offset_ptr + column)", t.RAGGED),
    Mutant("rstd of rows that are not there", t.BACKWARD,
           "\n        rstd = load_vector(a.rstd, row, valid, BLOCK_ROWS, COMPUTE)",
           "\n        rstd = tl.load(a.rstd + row)", t.RAGGED),
    Mutant("c2 of rows that are not there, fused", t.LINEAR_BACKWARD,
           "c2 = load_vector(c2_ptr, row, valid, BLOCK_ROWS, COMPUTE)", "c2 = tl.load(c2_ptr + row)",
           t.EXECUTED_FUSED),
    Mutant("a thread takes as many of two dtypes as a load of the narrower", t.GEOMETRY,
           "return 16 // max(widths) if len(widths) > 1 else None", "return None", t.TWO_DTYPES),
    Mutant("that columns are neighbours hidden from the compiler, fused", t.TERMS,
           "matrix_ptr + start[:, None] + column[None, :], mask=mask, other=0.0)",
           "matrix_ptr + start[:, None] + (column[None, :] ^ (start[:, None] >> 30)), mask=mask, other=0.0)",
           t.EXECUTED_FUSED),
    # What the compiler is told, and the launch.
    Mutant("numbers said to be multiples of 16", t.LOWERING, """if of.startswith("*")}""", """if of != "constexpr"}""",
           t.SEVERAL_TILES),
    Mutant("a program too few launched", t.LOWERING, "(kernel, launch.programs, 1, 1, parameters)",
           "(kernel, max(1, launch.programs - 1), 1, 1, parameters)", t.RAGGED),
    Mutant("arguments not in the kernel's order", t.LAUNCH,
           "return {name: arguments[name] for name in places(self.kernel) if name in arguments}", "return arguments",
           t.RAGGED),
    Mutant("ones passed though they are constants", t.LOWERING, "if a != 1  # a constant", "if a != -1  # a constant",
           t.ONE_ROW),
    Mutant("always four warps", t.LOWERING, "facts = (launch.tile.warps_of(chip), 1,", "facts = (4, 1,",
           t.SEVERAL_TILES),
    Mutant("no shared memory asked for", t.LOWERING, "1, binary.shared, code", "1, 0, code", t.SEVERAL_TILES),
    # The assembler that jaxlib takes, which reads the kernels.
    Mutant("PTX as new as Triton's own ptxas", TILE, 'options["ptx_version"] = chip.ptx_version\n', "pass\n",
           (f"{ASSEMBLED}test_kernels_are_assembled[h200]",)),
    Mutant("a ptxas that jaxlib passes by", PTXAS, " and version >= LEAST and version != FAULTY", "",
           (f"{ASSEMBLED}test_it_is_none_that_jaxlib_passes_by",)),
    Mutant("the plugin's own ptxas in front of PATH's", PTXAS,
           '(*folders, *(f"{root}/bin" for root in (*TOOLKITS, *beside)))',
           '(*(f"{root}/bin" for root in (*TOOLKITS, *beside)), *folders)',
           (f"{ASSEMBLED}test_it_is_the_first_that_is_new_enough",)),
    Mutant("a ptxas not asked for", TARGET, "and is_here and (reason", "and False and (reason",
           (f"{ASSEMBLED}test_without_one_jnp_runs", f"{ASSEMBLED}test_with_one_that_refuses_kernels_jnp_runs")),
]  # fmt: skip
