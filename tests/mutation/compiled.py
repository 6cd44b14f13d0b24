"""Ways to break what only the executed rung sees: what the interpreter lets pass, and what it does not run."""

from targets import (
    EXECUTED_FUSED,
    LAUNCH,
    LINEAR,
    NEIGHBOURS,
    NORM,
    ONE_ROW,
    RAGGED,
    SEVERAL_TILES,
    Mutant,
)

COMPILED = [
    # Reads outside of an array whose values nobody uses.
    Mutant(
        "offset read beyond its end", NORM,
        "tl.load(offset_ptr + column, mask=exists, other=0.0)", "tl.load(offset_ptr + column)", RAGGED,
    ),
    Mutant(
        "rstd of rows that are not there", NORM,
        "return mean, tl.load(rstd_ptr + row, mask=valid, other=0.0)", "return mean, tl.load(rstd_ptr + row)", RAGGED,
    ),
    Mutant(
        "c2 of rows that are not there, fused", LINEAR,
        "c2 = tl.load(c2_ptr + row, mask=valid, other=0.0)", "c2 = tl.load(c2_ptr + row)", EXECUTED_FUSED,
    ),
    Mutant(
        "that rows are whole neighbours hidden from the compiler", NORM,
        "tl.cast(rows // INNER, tl.int64) * (H * INNER)", "tl.cast(rows, tl.int64) * H", NEIGHBOURS,
    ),
    # What the compiler is told, and the launch.
    Mutant(
        "numbers said to be multiples of 16", LAUNCH,
        """if signature[name].startswith("*"):""", """if signature[name] != "constexpr":""", SEVERAL_TILES,
    ),
    Mutant(
        "a program too few launched", LAUNCH, "(kernel, launch.programs, 1, 1, parameters)",
        "(kernel, max(1, launch.programs - 1), 1, 1, parameters)", RAGGED,
    ),
    Mutant(
        "results before operands", LAUNCH, "for a in (*launch.arguments, *launch.results)\n",
        "for a in (*launch.results, *launch.arguments)\n", RAGGED,
    ),
    Mutant(
        "ones passed though they are constants", LAUNCH, "if a != 1  # a constant", "if a != -1  # a constant", ONE_ROW,
    ),
    Mutant("always four warps", LAUNCH, "facts = (launch.tile.warps, 1,", "facts = (4, 1,", SEVERAL_TILES),
    Mutant("no shared memory asked for", LAUNCH, "1, binary.shared, binary.ptx", "1, 0, binary.ptx", SEVERAL_TILES),
]  # fmt: skip
