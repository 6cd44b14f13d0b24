"""Ways to break an offset that is read row by row."""

from targets import (
    ACCESS,
    ARRAYS,
    GEOMETRY,
    JUNCTION,
    LINEAR_TILES,
    NORM_ARGUMENTS,
    OPERATIONS,
    TERMS,
    WIDER,
    XLA_GRADIENTS,
    XLA_LINEAR,
    Mutant,
)

VALUES = f"{JUNCTION}test_values_and_every_gradient"
APART = (f"{VALUES}[triton-layer_norm-no gate-apart--1]",)
TWO_AXES = (f"{VALUES}[triton-layer_norm-no gate-apart, the offset over two axes--1]",)
SIDE_BY_SIDE = (f"{VALUES}[triton-layer_norm-no gate-apart-1]",)
ALONE = (f"{VALUES}[xla-layer_norm_linear-no gate-apart, the offset alone by row--1]",)
IN_PLACE = f"{JUNCTION}test_an_offset_apart_is_not_written_out"
BESIDE = "tests/transformations/test_wider.py::test_examples_beside_parameters_along_axes"

BY_ROW = [
    Mutant("an offset's rows not divided by those behind", ACCESS, "place // OFFSET.terms[i] %", "place %", TWO_AXES),
    Mutant(
        "an offset's rows counted in their group", ACCESS,
        "place = first_row_of(group, rows, INTERLEAVED) + row", "place = row",
        (f"{VALUES}[triton-layer_norm-no gate-apart, the offset by row--1]",),
    ),
    Mutant("an offset's rows counted on", ACCESS, "% OFFSET.terms[i + 1] * OFFSET.terms", "* OFFSET.terms", APART),
    Mutant(
        "the columns of an offset taken for neighbours", TERMS,
        "column.to(tl.int64) * OFFSET.step", "column.to(tl.int64)", SIDE_BY_SIDE,
    ),
    Mutant(
        "an offset's columns counted as rows", GEOMETRY,
        "rows *= 1 if i == h else self.shape[i]", "rows *= self.shape[i]", TWO_AXES,
    ),
    Mutant(
        "an offset by row written out for its examples", GEOMETRY,
        """ and not (name == "offset" and geometry.norm.offset_rows)""", "",
        (f"{JUNCTION}test_transformed[layer_norm-no gate-apart-vmap(grad), over all-False-triton]",),
    ),
    Mutant(
        "an offset along other axes written out", NORM_ARGUMENTS,
        "return own if own - others and", "return own if False and", (f"{IN_PLACE}[apart]",),
    ),
    Mutant(
        "an offset of x's size written out with the scale", NORM_ARGUMENTS,
        "(others or own == _along(operands.x, h))", "others", (f"{IN_PLACE}[apart, the offset alone by row]",),
    ),
    Mutant(
        "an offset's axes not moved with x's", NORM_ARGUMENTS,
        "by_row = tuple(order.index(i) - x.ndim for i in by_row)", "by_row = norm.offset_rows", (
            f"{VALUES}[xla-layer_norm-no gate-apart, the offset by example-1]",
        ),
    ),
    Mutant(
        "an offset's gradient summed over its own axes", XLA_GRADIENTS,
        "(*norm.offset_rows, norm.axis)", "(norm.axis,)", APART,
    ),
    Mutant(
        "an offset's gradient summed over vmap's axes", XLA_GRADIENTS,
        "own = {*range(batch_dims), *(dy.ndim + i", "own = {*(dy.ndim + i",
        (f"{JUNCTION}test_transformed[layer_norm-no gate-apart-grad(vmap), over all-True-xla]",),
    ),
    Mutant(
        "the offset of x's norm taken for the sum's", XLA_GRADIENTS,
        "of_x = dataclasses.replace(norm, both_sides=False, offset_rows=())",
        "of_x = dataclasses.replace(norm, both_sides=False)",
        (f"{JUNCTION}test_norms_on_both_sides_with_an_offset_apart[xla-('total',)]",),
    ),
    Mutant(
        "an offset's gradient from the operation, which sums over rows", OPERATIONS,
        "if norm.offset_rows and dtypes.offset is not None:", "if False:", APART,
    ),
    Mutant(
        "few features behind an offset by row in one kernel", LINEAR_TILES,
        "junction.norm.offset_rows or ", "",
        (f"{JUNCTION}test_few_features_behind_a_sum_of_one_kind[triton-add_layer_norm_linear-an offset by row]",),
    ),
    Mutant(
        "an offset by row's gradient from that of the bias", XLA_LINEAR,
        " or norm.offset_rows or junction", " or junction", ALONE,
    ),
    Mutant(
        "the axes of an offset by row not counted where vmap's is among them", ARRAYS,
        "i - (ndim + i < place) for", "i for",
        (f"{JUNCTION}test_vmap_inside_of_the_derivative_by_an_offset_of_each_row[xla-1]",),
    ),
    Mutant(
        "kernels for what they would have transposed", "jln/_operators/call.py",
        "if back is not None and junction.norm.axis != -1 and", "if False and",
        (f"{JUNCTION}test_what_kernels_would_have_transposed_is_left_to_xla",),
    ),
    Mutant(
        "vmap's axis of an offset by row not counted", WIDER,
        "if norm.offset_rows and axes.offset is not None:", "if False:",
        (f"{BESIDE}[xla-(1, 1, 1, 5)-(1, 1, 4, 5)--1-3-None--1-inside]",),
    ),
    Mutant(
        "an offset by row taken for one of examples", ARRAYS,
        'return columns - {"offset"} if norm.offset_rows else columns', "return columns",
        (f"{BESIDE}[xla-(2, 1, 1, 1)-(1, 3, 4, 1)--1-0-0-None-inside]",),
    ),
]  # fmt: skip
