"""Ways to break blocks of eight bits along the rows."""

from targets import VMAPS, Mutant

KERNEL = "jln/_junction/kernels/along_rows.py"
RULES = "jln/_junction/along_rows.py"
LAUNCH = "jln/_junction/launches_along_rows.py"
PRODUCTS = "jln/_junction/linears/eight_bits.py"
TESTS = "tests/operators/test_along_rows.py::"
LINEARS = "tests/operators/test_linears_in_eight_bits.py::"
BITS, AFFINE, BESIDE = (
    f"{TESTS}{name}" for name in ("test_bits", "test_a_mean_and_an_offset", "test_the_kernel_beside_xla")
)
VMAP = f"{TESTS}test_vmap"
NORMS = "tests/operators/test_rows_in_eight_bits.py::"
DERIVATIVES = "jln/_junction/derivatives.py"
USERS, CALL = "jln/_operators/eight_bits.py", "jln/_operators/call.py"
MESH = "tests/devices/test_eight_bit_linears.py::test_on_a_mesh"

ALONG_ROWS = [
    Mutant(
        "rows not centred, in blocks of rows",
        KERNEL,
        "(x - mean[:, None]) * rstd",
        "x * rstd",
        (AFFINE,),
    ),
    Mutant(
        "rstd left out, in blocks of rows",
        KERNEL,
        "(x - mean[:, None]) * rstd[:, None]",
        "(x - mean[:, None])",
        (AFFINE,),
    ),
    Mutant(
        "statistics of other rows",
        KERNEL,
        "load_vector(rstd_ptr, block * 32 + local,",
        "load_vector(rstd_ptr, local,",
        (AFFINE,),
    ),
    Mutant(
        "rows of a block in the order of loads",
        KERNEL,
        "local % 4 * 8 + local // (of_tile * 4)",
        "local % 4 + local // (of_tile * 4) * 4",
        (BITS,),
    ),
    Mutant("rows of other blocks", KERNEL, "(1, 2, 0, 3)", "(1, 0, 2, 3)", (BITS,)),
    Mutant("an offset in rows that are not there", KERNEL, "if RAGGED:", "if False:", (AFFINE,)),
    Mutant("blocks that rows are said to fill", LAUNCH, "RAGGED=g.rows % BLOCK != 0", "RAGGED=False", (AFFINE,)),
    Mutant("the largest of a column by its sign", KERNEL, " & 0x7FFFFFFF", "", (BITS,)),
    Mutant(
        "the first rows in each tile",
        KERNEL,
        '"x", group, rows, H, SHARED, base=block * (32 * H))',
        '"x", group, rows, H, SHARED)',
        (BITS,),
    ),
    Mutant(
        "rows behind the last",
        KERNEL,
        "tl.minimum(rows - block * 32, BLOCK_ROWS)",
        "tl.minimum(rows, BLOCK_ROWS)",
        (BITS,),
    ),
    Mutant(
        "blocks behind the last", KERNEL, "tl.minimum(blocks - block, of_tile)", "tl.minimum(blocks, of_tile)", (BITS,)
    ),
    Mutant("the first example's results, H first", KERNEL, "(group * H + column", "(column", (VMAP,)),
    Mutant("the first example's results, rows first", KERNEL, "(group * blocks + block) * H", "block * H", (VMAP,)),
    Mutant(
        "all tiles in the place of the first, H first",
        KERNEL,
        "column.to(tl.int64)) * blocks + block",
        "column.to(tl.int64)) * blocks",
        (BITS,),
    ),
    Mutant("columns of the first tile", KERNEL, "program % chunks * BLOCK_H", "0", (BITS,)),
    Mutant("blocks over several examples", LAUNCH, "has_sums=batch_dims > 0", "has_sums=False", (VMAP,)),
    Mutant("a program for each tile of rows alone", LAUNCH, " * g.chunks(tile),", ",", (BITS,)),
    Mutant("the exponent of e4m3 for blocks of rows", LAUNCH, "LARGEST_EXPONENT[dtypes.y]", "8", (BITS,)),
    Mutant(
        "blocks of rows by a kernel on a chip that has no eight bits",
        LAUNCH,
        "if not target.chip.rounds_to_eight_bits:",
        "if False:",
        (f"{TESTS}test_chips_that_do_not_convert_have_all_of_it_by_xla",),
    ),
    Mutant(
        "rows that repeat where no block is filled",
        RULES,
        "for i, n in enumerate(y.shape)])",
        'for i, n in enumerate(y.shape)], mode="edge")',
        (f"{AFFINE}[xla-(3, 11)-96-rows first]",),
    ),
    Mutant("blocks of each axis of rows", RULES, "if not rows or rows[-1] % BLOCK:", "if not rows:", (BITS,)),
    Mutant(
        "rows first for H first",
        RULES,
        "y, axis = jnp.moveaxis(y, -1, batch_dims), y.ndim - 1",
        "axis = y.ndim - 2",
        (f"{BITS}[xla-(3, 64)-40-e4m3-H first]",),
    ),
    Mutant(
        "NaN not seen on a CPU in blocks of rows",
        RULES,
        "largest=largest_of_bits)",
        "largest=bits_of_largest)",
        (BESIDE,),
    ),
    Mutant("a block over several devices", RULES, "whole=(Kind.HIDDEN,)", "whole=()", (MESH,)),
    Mutant(
        "one scale for all examples in blocks of rows",
        RULES,
        "return not norm.has_groups",
        "return True",
        (f"{LINEARS}test_parameters_of_examples",),
    ),
    Mutant(
        "an operation between z and its eight bits where XLA is asked for",
        PRODUCTS,
        ' and junction.implementation != "xla":',
        ":",
        (f"{LINEARS}test_xla_makes_z_where_it_quantises_it",),
    ),
    Mutant(
        "derivatives of z along the rows",
        PRODUCTS,
        "Eight(_in_dtype(junction.y_dtype, values), scale, tuple(axes))",
        "Eight(values, scale, tuple(axes))",
        (f"{LINEARS}test_errors",),
    ),
    Mutant(
        "silu behind a norm left out, in blocks of rows",
        KERNEL,
        "offset, z_ptr, added_ptr, at",
        "offset, None, added_ptr, at",
        (f"{NORMS}test_every_norm",),
    ),
    Mutant(
        "silu in front of a norm left out, in blocks of rows",
        KERNEL,
        "x_ptr, x_z_ptr, None,",
        "x_ptr, None, None,",
        (f"{NORMS}test_every_norm",),
    ),
    Mutant(
        "nothing added in blocks of rows",
        KERNEL,
        "offset, z_ptr, added_ptr, at",
        "offset, z_ptr, None, at",
        (f"{NORMS}test_every_norm",),
    ),
    Mutant(
        "the first rows of what gates",
        KERNEL,
        '"z", group, rows, H, SHARED, base=block * (32 * H))',
        '"z", group, rows, H, SHARED)',
        (f"{NORMS}test_every_norm",),
    ),
    Mutant(
        "the first rows of what gates in front",
        KERNEL,
        '"x_z", group, rows, H, SHARED, base=block * (32 * H))',
        '"x_z", group, rows, H, SHARED)',
        (f"{NORMS}test_every_norm",),
    ),
    Mutant(
        "the first rows of what is added",
        KERNEL,
        '"added", group, rows, H, SHARED, base=block * (32 * H))',
        '"added", group, rows, H, SHARED)',
        (f"{NORMS}test_every_norm",),
    ),
    Mutant(
        "silu behind a norm left out by XLA",
        RULES,
        "y = wide(Product(y, operands.z))",
        "pass",
        (f"{NORMS}test_every_norm",),
    ),
    Mutant(
        "nothing added by XLA in blocks of rows",
        RULES,
        "y = y + operands.added.astype(y.dtype)",
        "pass",
        (f"{NORMS}test_every_norm",),
    ),
    Mutant(
        "silu in front of a norm left out by XLA",
        RULES,
        "operands.x if operands.x_z is None else Product(operands.x, operands.x_z)",
        "operands.x",
        (f"{NORMS}test_every_norm",),
    ),
    Mutant(
        "x normed in place of the sum",
        DERIVATIVES,
        "of_y if outcome.total is None else of_y._replace(x=outcome.total)",
        "of_y",
        (f"{NORMS}test_every_norm",),
    ),
    Mutant(
        "a vmap's examples among rows that have blocks",
        VMAPS,
        'junction.eight_bits in ("one", "rows")',
        'junction.eight_bits == "one"',
        (f"{NORMS}test_vmap_is_a_loop",),
    ),
    Mutant(
        "scales of rows spread over H",
        USERS,
        "-1 if scale.shape[-1] != values.shape[-1] else -2",
        "-1",
        (f"{NORMS}test_every_norm",),
    ),
    Mutant(
        "any rows in blocks", USERS, "x.ndim < 2 or x.shape[-2] % BLOCK", "False", (f"{NORMS}test_what_is_refused",)
    ),
    Mutant(
        "parameters of rows in blocks of rows",
        USERS,
        "and math.prod(a.shape[:-1]) > 1",
        "and False",
        (f"{NORMS}test_what_is_refused",),
    ),
    Mutant(
        "any axis of blocks",
        USERS,
        "if not (_checks.is_number(quantize.axis) and quantize.axis == -1):",
        "if False:",
        (f"{NORMS}test_what_is_refused",),
    ),
    Mutant(
        "Linears in blocks of rows",
        USERS,
        "if arrays.kernel is not None:",
        "if False:",
        (f"{NORMS}test_what_is_refused",),
    ),
    Mutant(
        "scales of rows as those of features on a mesh",
        CALL,
        "PartitionSpec(*specs.x[:-2], None, specs.x[-1])",
        "PartitionSpec(*specs.x[:-1])",
        (f"{NORMS}test_on_a_mesh",),
    ),
]
