"""Ways to break few features behind a gated sum, and of examples with parameters of their own."""

from targets import (
    ARRAYS,
    IN_SHARES,
    JUNCTION_MESH,
    LINEAR,
    LINEAR_BACKWARD,
    LINEAR_LAUNCH,
    LINEAR_TILES,
    PLACEMENT,
    SHAPES,
    XLA_LINEAR,
    Mutant,
)

OF_EXAMPLES = "tests/operators/test_few_features_of_examples.py::"
VALUES = f"{OF_EXAMPLES}test_values_and_every_gradient"
GATED = (f"{VALUES}[add_layer_norm_linear-H-shared-(3, 70)]",)
BY_ROW = (f"{VALUES}[add_rms_norm_linear-rows-shared-(3, 70)]",)
NORMS = (f"{VALUES}[layer_norm_linear-no gate-by example-(3, 70)]",)
GATES = (f"{VALUES}[add_layer_norm_linear-by example-by example-(3, 70)]",)
SEVERAL = (f"{OF_EXAMPLES}test_several_programs[by example-by example-40-rows0]",)
IN_TURN = (f"{OF_EXAMPLES}test_several_programs[by example-by example-6-rows1]",)
ON_A_MESH = (f"{JUNCTION_MESH}test_few_features[layer_norm_linear-no gate-by example-examples]",)
OF_STAGES = ("tests/devices/test_shard_map.py::test_few_features_of_examples_over_some_axes[kernels]",)

KEEPING = "tests/operators/test_kept_product.py::"
DIGITS = (f"{KEEPING}test_every_column_of_dx_keeps_its_digits[add_layer_norm_linear-with_large_columns]",)
KEPT, KEPT_BY_KERNEL = ((f"{KEEPING}test_what_is_kept[shared-{by}]",) for by in ("xla", "triton"))
NO_SCALE = (f"{KEEPING}test_values_and_every_gradient[add_layer_norm_linear-by example-shared-(3, 70)-('scale',)]",)
KEPT_OF_EXAMPLES = (f"{KEEPING}test_values_and_every_gradient[add_layer_norm_linear-by example-by example-(3, 70)-()]",)
NO_MEAN = (f"{KEEPING}test_a_rows_dx_has_no_mean[by example]",)
WHERE_KEPT, FUSED = ((f"{KEEPING}test_{of}",) for of in ("where_it_is_kept", "kept_where_both_passes_are_fused"))


def of_another(name: str, mine: str, test: tuple[str, ...]) -> list[Mutant]:
    """Mutants that take the first example's parameter for all of them, forward and backward."""
    at = f'columns_at({name}_ptr, "{name}", group, H, SHARED)'
    first = at.replace("group", "group * 0")
    return [
        Mutant(f"{mine} for all, fused {way}", file, f"{to} = {at}", f"{to} = {first}", test)
        for way, file, to in (("forward", LINEAR, f" {name}_ptr"), ("backward", LINEAR_BACKWARD, f"{name}_of_group"))
        if (name, way) != ("scale", "backward")
    ]


FEW_FEATURES = [
    *of_another("gate", "the first example's gate", GATES),
    *of_another("scale", "the first example's scale", NORMS),
    *of_another("offset", "the first example's offset", NORMS),
    Mutant(
        "x_bias forgotten, fused", LINEAR,
        "x = with_bias(x, x_bias_ptr, column, exists, COMPUTE)", "pass", GATED,
    ),
    Mutant(
        "a gate forgotten, fused", LINEAR,
        "x = gated(x, gate_ptr, row_gate_ptr, row_gate, column, exists, COMPUTE)", "pass", GATED,
    ),
    Mutant(
        "dx not gated, fused", LINEAR_BACKWARD,
        "dx = gated(dx, gate_of_group, row_gate_ptr, row_gate, column, exists, COMPUTE)", "pass", BY_ROW,
    ),
    Mutant(
        "x_bias left out of a gate's gradient, fused", LINEAR_BACKWARD,
        "branch = with_bias(branch, x_bias_of_group, column, exists, COMPUTE)", "pass", GATED,
    ),
    Mutant(
        "dx_bias before the gate, fused", LINEAR_BACKWARD,
        "dx_bias = _add(dx_bias, dx, None)", "dx_bias = _add(dx_bias, dz, None)", GATED,
    ),
    Mutant(
        "a row's gate's gradient of the first columns, fused", LINEAR_BACKWARD,
        "first // BLOCK_H * all_rows + row, share", "row, share", BY_ROW,
    ),
    Mutant(
        "columns that are not there in a row's gate's gradient, fused", LINEAR_BACKWARD,
        "tl.where(exists[None, :], dx * branch, 0.0)", "dx * branch",
        (f"{OF_EXAMPLES}test_columns_that_are_not_there_in_a_row_gates_gradient",),
    ),
    Mutant(
        "dkernel without the examples' offsets", LINEAR_BACKWARD,
        "z = affine(x_hat, scale, offset)", "z = x_hat * scale[None, :]", NORMS,
    ),
    Mutant("doffset of x_hat, fused", LINEAR_BACKWARD, "_add(doffset, dz, None)", "_add(doffset, dz, x_hat)", NORMS),
    Mutant(
        "an example's sums in the place of another's, fused", LINEAR_BACKWARD,
        "at = (group * programs + split % programs) * H + column", "at = (split % programs) * H + column", NORMS,
    ),
    Mutant(
        "examples taken by several programs that do not share them", LINEAR_BACKWARD,
        "first_group, end, step = split // programs, groups, splits // programs",
        "first_group, end, step = split // programs, groups, 1", IN_TURN,
    ),
    Mutant(
        "the first tiles of some examples left out", LINEAR_BACKWARD,
        "split % programs, tiles_of(", "split, tiles_of(", SEVERAL,
    ),
    Mutant(
        "row sums of the first example alone", LINEAR_BACKWARD,
        "for tile in range(program, tiles * groups, programs):", "for tile in range(program, tiles, programs):", NORMS,
    ),
    Mutant(
        "a part's c2 behind one example's rows", LINEAR_BACKWARD,
        "c2_ptr + part * all_rows + row, tl.sum", "c2_ptr + part * rows + row, tl.sum", SEVERAL,
    ),
    Mutant(
        "digits that a product's operand loses left out of what is kept", LINEAR,
        "product = (product + rest) *", "product = product *", DIGITS,
    ),
    Mutant(
        "lost digits not resized when rstd is", LINEAR,
        "rest *= (unit / before)[:, None]", "rest *= 1.0", KEPT_BY_KERNEL,
    ),
    Mutant(
        "the product kept with the offset, by XLA", XLA_LINEAR,
        "bias=None, offset=None)\n    z", "bias=None)\n    z", KEPT,
    ),
    Mutant(
        "row sums of the first example's product alone", LINEAR_BACKWARD,
        "range(program, groups * tiles, programs)", "range(program, tiles, programs)", KEPT_OF_EXAMPLES,
    ),
    Mutant(
        "c1 by the first example's scale", LINEAR_BACKWARD,
        'columns_at(weight_ptr, "scale", group, SHARES', 'columns_at(weight_ptr, "scale", group * 0, SHARES',
        NO_MEAN,
    ),
    Mutant(
        "a share of the kernel's columns left out of c1", LINEAR_BACKWARD,
        "share * N, share < SHARES, 0", "share * N, share < SHARES - 1, 0", NO_MEAN,
    ),
    Mutant(
        "dbias of a program's last tile, beside the product", LINEAR_BACKWARD,
        "dbias += tl.sum(dy, axis=0)", "dbias = tl.sum(dy, axis=0)",
        (f"{KEEPING}test_several_programs[shared-3]",),
    ),
    Mutant(
        "c1 without the scale, of the product", LINEAR_LAUNCH,
        "jnp.pad(s[:, :, None] * kernel", "jnp.pad(jnp.ones_like(s)[:, :, None] * kernel", NO_MEAN,
    ),
    Mutant(
        "no scale taken for one of each example", LINEAR_LAUNCH,
        "if operands.scale is None and g.groups > 1:", "if False:",
        NO_SCALE,
    ),
    Mutant(
        "the statistics made again without the product, by a kernel that makes none", LINEAR_LAUNCH,
        "if keeps:  # by", "if False:  # by", (f"{KEEPING}test_checkpoints[products]",),
    ),
    Mutant(
        "a product taken for wanted where it is not", LINEAR_LAUNCH,
        "bool(jax.tree.leaves(dtypes.product))", "dtypes.product is not None",
        (f"{KEEPING}test_a_sum_alone_is_made_again_without_products",),
    ),
    Mutant(
        "a product kept that is half as large as x", LINEAR_TILES, "or 16 * n > h:", "or 4 * n > h:", WHERE_KEPT,
    ),
    Mutant(
        "a product kept of operands in any dtype", LINEAR_TILES,
        'None if dtype != "bfloat16" else forward_tile', "forward_tile", WHERE_KEPT,
    ),
    Mutant(
        "a product kept of examples of few rows", LINEAR_TILES,
        "return fills(tile, g) and _have", "return _have", FUSED,
    ),
    Mutant(
        "a product kept where an x_bias that is frozen lets backward alone be fused", LINEAR_TILES,
        "operands.gated or operands.x_bias is not None", "operands.gated", FUSED,
    ),
    Mutant(
        "a product kept of examples behind an x_bias, which a B200 has no registers for", LINEAR_TILES,
        'CHIPS["h200" if operands.gated else "b200"]', 'CHIPS["h200"]', FUSED,
    ),
    Mutant(
        "a product made by a CPU, where nobody reads it", XLA_LINEAR,
        "norms=IN_JNP_ON_CPU, product_by=_unread", "norms=IN_JNP_ON_CPU",
        (f"{KEEPING}test_xla_makes_no_product_that_nobody_reads[two programs]",),
    ),
    Mutant(
        "zeros, which give gradients that look like some, in the place of a CPU's product", XLA_LINEAR,
        "jnp.full(a.shape, jnp.finfo(a.dtype).max, a.dtype)", "jnp.zeros(a.shape, a.dtype)",
        (f"{KEEPING}test_a_cpu_has_no_product_that_kernels_could_mistake_for_one",),
    ),
    Mutant(
        "a product that is kept made by a pass of its own for few rows", LINEAR_TILES,
        "return tile if keeps or fused <= composed", "return tile if fused <= composed", WHERE_KEPT,
    ),
    Mutant(
        "the product held for every gradient", ARRAYS,
        'scale: Annotated[Any, _operand(Shape.COLUMN, *DY, *_X_HAT, "z")]',
        'scale: Annotated[Any, _operand(Shape.COLUMN, *DY, *_X_HAT, "z", "product")]',
        (f"{KEEPING}test_held_for_what_is_made_of_it_alone[triton]",),
    ),
    Mutant(
        "the product held and not read", ARRAYS,
        '"rstd", "z", "x_z", "product")', '"rstd", "z", "x_z")', KEPT_OF_EXAMPLES,
    ),
    Mutant(
        "dx_bias's shares in the place of dgate's", LINEAR_BACKWARD,
        'dgate += _load_shares(shares_ptr, split, splits, "dgate"',
        'dgate += _load_shares(shares_ptr, split, splits, "dx_bias"', GATED,
    ),
    Mutant(
        "dx alone handed what a gate's gradient is made of", LINEAR_LAUNCH,
        'gradients["row_gate"] = jnp.sum(gradients["row_gate"], axis=0)',
        'gradients["row_gate"] = gradients["row_gate"][0]', BY_ROW,
    ),
    Mutant(
        "dkernel of examples times the first example's scale", LINEAR_LAUNCH,
        '"scale": operands.scale if wants_dkernel and one_group else None',
        '"scale": operands.scale if wants_dkernel else None', NORMS,
    ),
    Mutant(
        "few rows of each example multiplied with many that are not there", LINEAR_TILES,
        "return 2 * g.rows >=", "return 200 * g.rows >=",
        (f"{OF_EXAMPLES}test_what_is_left_to_the_norm_and_a_product",),
    ),
    Mutant(
        "dkernel of a device's examples alone", SHAPES,
        "over_rows = (Kind.ROW, Kind.BATCH) if norm.has_groups", "over_rows = (Kind.ROW,) if norm.of_examples",
        ON_A_MESH,
    ),
    Mutant(
        "a product's rows that are no examples", SHAPES,
        "return _dims_of_linears(kind, tuple(of_x[:-1]),",
        "return _dims_of_linears(kind, (*of_x[:batch_dims], *(Dim(Kind.ROW, i) for i in range(batch_dims, ndim - 1))),",
        ON_A_MESH,
    ),
    Mutant(
        "dkernel of each of vmap's examples added up over devices", PLACEMENT, "Kind.BATCH: own}", "Kind.BATCH: set()}",
        (f"{JUNCTION_MESH}test_few_features_of_examples_under_vmap",),
    ),
    Mutant(
        "shares of the examples on some devices left out", IN_SHARES,
        "over = [tuple(a for axes in placement.summed(r) for a in axes) for r in sums]",
        "over = [placement.over(Kind.ROW) for r in sums]", OF_STAGES,
    ),
]  # fmt: skip
