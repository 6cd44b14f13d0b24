"""Launches, kernels and launchers broken on purpose: each must raise a Violation or give a wrong result."""

import dataclasses
import re

import pytest

from cases import Case, execute
from ptx import Violation
from slips import broken

ACCESS, RECORDS = "jln._junction.kernels.addresses", "jln._junction.kernels.records"
NORMS, NORM_LAUNCH = "jln._junction.kernels.backward", "jln._junction.launches"
GEOMETRY = "jln._junction.geometry"
TERMS, ROW_TERMS = "jln._junction.kernels.terms", "jln._junction.kernels.row_terms"
LINEARS, LINEAR_LAUNCH = "jln._junction.kernels.with_linear", "jln._junction.linears.launches"
LINEARS_BACKWARD = "jln._junction.kernels.with_linear_backward"
# In turn: several tiles, the last one ragged, of rows whose length is no power of two; more tiles than programs; rows
# that several programs share; rows in chunks; several groups; several groups of heads, which share some operands.
WHOLE = Case("add_layer_norm", (37, 100), "float32", "small-h200")
UNALIGNED = Case("layer_norm", (29, 1001), "bfloat16", "small-h200")
CHUNKS = Case("layer_norm", (3, 16401), "bfloat16", "small-h200")
GROUPS = Case("add_layer_norm", (9, 40), "float32", "small-h200", over="rsd")
HEADS = Case("layer_norm", (21, 3, 64), "bfloat16", "small-h200", of_heads=True, over="sd")
FUSED = Case("layer_norm_linear", (100, 128), "bfloat16", "small-h200", (32,))
FUSED_MMA = dataclasses.replace(FUSED, chip="small-a100")
FUSED_SUM = Case("add_layer_norm_linear", (100, 128), "bfloat16", "small-h200", (32,))
COMPOSED_SUM = Case("add_layer_norm_linear", (37, 128), "bfloat16", "small-h200", (300,))


def noticed(case, edit=None) -> str | None:
    """Return a description of what is wrong with a case's execution, or None where nothing is."""
    try:
        ran = execute(case, edit=edit)
    except Violation as violation:
        return str(violation)
    wrong = {name: share for name, share in ran.shares.items() if not share <= 1}
    unwritten = [stats.unwritten for stats in ran.program.stats if stats.unwritten]
    unwaited = [stats.name for stats in ran.program.stats if stats.unwaited]
    return str((wrong, unwritten, unwaited)) if wrong or unwritten or unwaited else None


def on(kernel, change):
    """Return an edit that makes `change` in one kernel's calls, and asserts that each of them is changed."""

    def edit(call):
        if call.name == f"jln_{kernel}_kernel":
            before = dataclasses.replace(call, aliases=dict(call.aliases), parameters=list(call.parameters))
            change(call)
            assert call != before, "nothing was changed"

    return edit


def grid(more):
    return lambda call: setattr(call, "grid", (call.grid[0] + more, 1, 1))


def scalar(index, more):
    """Return a change that adds `more` to the `index`-th scalar of a call."""

    def change(call):
        where = [i for i, p in enumerate(call.parameters) if p is not None][index]
        kind, value = call.parameters[where]
        call.parameters[where] = (kind, value + more)

    return change


def swap_scalars(call):
    first, second = [i for i, p in enumerate(call.parameters) if p is not None]
    p = call.parameters
    p[first], p[second] = p[second], p[first]


def swap_arrays(a, b):
    """Return a change by which the kernel takes its parameters `a` and `b` for each other."""

    def change(call):
        names = {f"[{call.entry}_param_{i}]": f"[{call.entry}_param_{j}]" for i, j in ((a, b), (b, a))}
        call.ptx = re.sub(r"\[\w+_param_\d+\]", lambda m: names.get(m[0], m[0]), call.ptx)

    return change


def text(pattern, new, count=1):
    """Return a change that replaces `pattern` by `new` in the PTX, `count` times at most, or everywhere if it is 0."""

    def change(call):
        call.ptx = re.sub(pattern, new, call.ptx, count=count)

    return change


LAUNCHES = [
    ("a program too many", GROUPS, "forward", grid(1)),
    ("a program too few", WHOLE, "forward", grid(-1)),
    ("a group of programs too many", GROUPS, "backward", grid(1)),
    ("a program too few, which owns columns", CHUNKS, "backward", grid(-1)),
    ("a tile too few to reduce", WHOLE, "reduce", grid(-1)),
    ("a row too many", WHOLE, "forward", scalar(0, 1)),
    ("a row too few", WHOLE, "forward", scalar(0, -1)),
    ("a row too many, backward", CHUNKS, "backward", scalar(0, 1)),
    ("a row too few of each head", HEADS, "forward", scalar(0, -1)),
    ("a share too many", WHOLE, "reduce", scalar(0, 1)),
    ("a share too few", WHOLE, "reduce", scalar(0, -1)),
    ("rows and groups swapped", GROUPS, "backward", swap_scalars),
    ("the residual and the scale swapped", WHOLE, "forward", swap_arrays(1, 2)),
    ("scale and offset swapped", WHOLE, "forward", swap_arrays(2, 3)),
    ("dy and dtotal swapped", WHOLE, "backward", swap_arrays(4, 5)),
    ("dy and the sum swapped", WHOLE, "backward", swap_arrays(4, 1)),
    ("mean and rstd swapped", CHUNKS, "row_sums", swap_arrays(2, 3)),
    ("c1 and c2 swapped", CHUNKS, "backward", swap_arrays(5, 6)),
    ("dtotal and the sum swapped, fused", FUSED_SUM, "backward", swap_arrays(6, 2)),
    ("the residual and the scale swapped, fused", FUSED_SUM, "forward", swap_arrays(1, 2)),
    ("dz and the sum swapped beside y", COMPOSED_SUM, "backward", swap_arrays(5, 2)),
    ("dtotal and the sum swapped beside y", COMPOSED_SUM, "backward", swap_arrays(6, 2)),
    ("half of the warps", WHOLE, "forward", lambda call: setattr(call, "warps", call.warps // 2)),
    ("too little shared memory", WHOLE, "backward", lambda call: setattr(call, "shared", call.shared - 16)),
    ("a barrier dropped", CHUNKS, "forward", text(r"bar\.sync\s+0;", "")),
    ("a wait dropped", WHOLE, "backward", text(r"cp\.async\.wait_group\s+\d+;", "", 0)),
    ("a product's wait dropped", FUSED, "row_sums", text(r"wgmma\.wait_group\.sync\.aligned\s+\d+;", "", 0)),
    ("a product's fence dropped", FUSED, "backward", text(r"fence\.proxy\.async\.shared::cta;", "", 0)),
    ("a copy's wait dropped, before mma", FUSED_MMA, "backward", text(r"cp\.async\.wait_group\s+\d+;", "", 0)),
    ("wide loads off their 16 bytes", WHOLE, "forward",
     text(r"(ld\.global\.v4\.b32 \{[^}]*\}, \[ %rd\d+ \+ )0", r"\g<1>4")),
    ("loads without a mask", UNALIGNED, "forward", text(r"@%p\d+ (ld\.global\.b16)", r"\1", 0)),
]  # fmt: skip

SOURCES = [
    # Row strides, bounds and masks.
    ("rows at the tile's width", WHOLE, ACCESS, "first * (H * HEADS), local.to(wide) * (H * HEADS)",
     "first * 128, local.to(wide) * 128"),
    ("rows of all heads from the first one's", HEADS, ACCESS, "(H * HEADS)) + group % HEADS * H", "(H * HEADS))"),
    ("a shared operand of the first head", HEADS, RECORDS, "return group % HEADS if", "return group * 0 if"),
    ("a row's statistics in another head's place", HEADS, ACCESS,
     "return (first + local) * HEADS", "return first + local"),
    ("programs of one head before the next one's", HEADS, ACCESS, "turn // programs * HEADS + program % HEADS",
     "turn // programs + program % HEADS"),
    ("a fused row stride of the tile's width", dataclasses.replace(FUSED, features=(24,)), LINEARS,
     "rows_of(tl.program_id(0), rows, N, BLOCK_ROWS)", "rows_of(tl.program_id(0), rows, BLOCK_N, BLOCK_ROWS)"),
    ("shares of dscale in one place, fused", dataclasses.replace(FUSED, shape=(1000, 64)), LINEARS_BACKWARD,
     "dscale_ptr + split * H + column", "dscale_ptr + column"),
    ("a mask dropped in dkernel's store", dataclasses.replace(FUSED, features=(24,)), LINEARS_BACKWARD,
     "tl.store(d.kernel + at, dkernel.to(d.kernel.dtype.element_ty), mask=mask)",
     "tl.store(d.kernel + at, dkernel.to(d.kernel.dtype.element_ty))"),
    ("a fused dx without c1", FUSED, LINEARS_BACKWARD, "-(c1 * rstd)[:, None])", "0.0 * rstd[:, None])"),
    # Terms of the formulas.
    ("c2 dropped", WHOLE, ROW_TERMS,
     "tl.fma(x_hat, -(c2 * rstd)[:, None], -(c1", "tl.fma(x_hat, 0.0 * rstd[:, None], -(c1"),
    ("c1 dropped", WHOLE, ROW_TERMS, "-(c1 * rstd)[:, None])", "0.0 * rstd[:, None])"),
    ("the sum's cotangent not added", WHOLE, NORMS,
     "dx += tl.load(a.dtotal + base + at, mask=mask, other=0.0).to(COMPUTE)", "pass"),
    ("y not multiplied by the scale", WHOLE, TERMS,
     "return tl.fma(x_hat, scale[None, :], offset)", "return x_hat + offset"),
    ("the sum's cotangent not added, fused", FUSED_SUM, LINEARS_BACKWARD,
     "dx += load_matrix(a.dtotal + base, start, valid, first, H, BLOCK_H).to(COMPUTE)", "pass"),
    ("a sum not written, fused", FUSED_SUM, LINEARS,
     "tl.store(r.total + base + start[:, None] + column[None, :], total, mask=mask)", "pass"),
    ("a sum's mask dropped, fused", FUSED_SUM, LINEARS,
     "+ column[None, :], total, mask=mask)", "+ column[None, :], total)"),
    ("a bias not added", FUSED, LINEARS, "constant = load_vector(a.bias", "constant = 0.0 * load_vector(a.bias"),
    # Operands and shares, which the kernels find by name.
    ("shares of dscale in the place of doffset's", WHOLE, NORMS,
     'store_sum(dscale, "scale"', 'store_sum(dscale, "offset"'),
    ("doffset's shares behind a dscale that is not there", dataclasses.replace(WHOLE, without="s"), ROW_TERMS,
     "first = position(SUMS, NAME) * programs", "first = 1 * programs"),
    ("dtotal shared where dy is", GROUPS, RECORDS, "copy_of(group, SHARED, item(NAMES, FIELD), HEADS)",
     'copy_of(group, SHARED, "dy" if item(NAMES, FIELD) == "dtotal" else item(NAMES, FIELD), HEADS)'),
    # What launchers say: grids, operands, scalars, switches and aliases.
    ("a grid of one tile less", WHOLE, NORM_LAUNCH, "        programs = g.programs(tile)",
     "        programs = g.programs(tile) - 1"),
    ("groups forgotten in the grid", GROUPS, NORM_LAUNCH,
     "programs=g.groups * programs * chunks", "programs=programs * chunks"),
    ("groups before rows", GROUPS, NORM_LAUNCH,
     '**c1_and_c2, "rows": g.rows, "groups": g.groups', '**c1_and_c2, "rows": g.groups, "groups": g.rows'),
    ("c2 for c1", CHUNKS, NORM_LAUNCH,
     '**c1_and_c2, "rows"', '"c1": c1_and_c2["c2"], "c2": c1_and_c2["c1"], "rows"'),
    ("epsilon forgotten", dataclasses.replace(WHOLE, epsilon=0.5), NORM_LAUNCH,
     "EPSILON=norm.epsilon,", "EPSILON=1e-6,"),
    ("a shared operand not said to be", GROUPS, GEOMETRY, "return tuple(shared), Arrays(", "return (), Arrays("),
    ("a fused tile of rows forgotten", FUSED, LINEAR_LAUNCH,
     "programs=ceil_div(rows, tile.rows),", "programs=ceil_div(rows, tile.rows) - 1,"),
    ("a split forgotten", FUSED, LINEAR_LAUNCH, "programs=plan.splits * ceil_div",
     "programs=(plan.splits - 1) * ceil_div"),
    ("c2 for c1, fused", FUSED, LINEAR_LAUNCH, '"c1": row_sums["c1"],', '"c1": row_sums["c2"],'),
    ("the offset for the scale, fused", FUSED, LINEAR_LAUNCH,
     'scale=operands.scale if dkernel', 'scale=operands.offset if dkernel'),
]  # fmt: skip


@pytest.mark.parametrize("case", sorted({case for _, case, *_ in LAUNCHES + SOURCES}, key=str), ids=str)
def test_nothing_is_noticed_where_nothing_is_broken(case):
    assert noticed(case) is None


@pytest.mark.parametrize(("case", "kernel", "change"), [s[1:] for s in LAUNCHES], ids=[s[0] for s in LAUNCHES])
def test_a_broken_launch_is_noticed(case, kernel, change):
    assert noticed(case, on(kernel, change))


@pytest.mark.parametrize(("case", "module", "old", "new"), [s[1:] for s in SOURCES], ids=[s[0] for s in SOURCES])
def test_a_broken_source_is_noticed(case, module, old, new):
    with broken(module, old, new):
        assert noticed(case)
