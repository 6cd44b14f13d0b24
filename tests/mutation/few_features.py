"""Ways to break few features behind a gated sum, and of examples with parameters of their own."""

from targets import (
    ARRAYS,
    IN_SHARES,
    JUNCTION_MESH,
    LINEAR,
    LINEAR_BACKWARD,
    LINEAR_LAUNCH,
    PLACEMENT,
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


def of_another(name: str, mine: str, test: tuple[str, ...]) -> list[Mutant]:
    """Mutants that take the first example's parameter for all of them, forward and backward."""
    at = f'columns_at({name}_ptr, "{name}", group, H, INTERLEAVED, SHARED)'
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
        "z = affine(x_hat, scale, offset_of_group, column, exists, None, COMPUTE)", "z = x_hat * scale[None, :]", NORMS,
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
        "a vmap's scales in the place of rows", LINEAR_LAUNCH,
        "are_rows = only_rows_differ(batch_dims, of_rows, list(columns.values()))", "are_rows = True",
        (f"{OF_EXAMPLES}test_vmap[(3, 70)-x and scale]",),
    ),
    Mutant(
        "few rows of each example multiplied with many that are not there", LINEAR_LAUNCH,
        "return 2 * g.rows >=", "return 200 * g.rows >=",
        (f"{OF_EXAMPLES}test_examples_of_few_rows_are_left_to_the_norm_and_a_product",),
    ),
    Mutant(
        "dkernel of a device's examples alone", ARRAYS,
        "over_rows = (Kind.ROW, Kind.BATCH) if norm.of_examples", "over_rows = (Kind.ROW,) if norm.of_examples",
        ON_A_MESH,
    ),
    Mutant(
        "a product's rows that are no examples", ARRAYS,
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
