"""Every operator, implementation and set of optional arguments, under every transformation.

Each result is compared with the reference's under the same transformation, in float64.
`pytest --collect-only -q tests/transformations/test_matrix.py -m ""` counts the cases.
"""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jln
import workbench
from catalogue import FORMS
from matrix import CASES, FORWARD, OPTIONAL, REVERSE, bind, first, one_row

# Transformations that each reach another rule of the primitive. By default they are enough for the operators that
# repeat what others show: RMSNorm is LayerNorm's primitive with a switch, which no transformation touches; a Linear
# behind a gated sum is the gated sum's norm and a product; and a gated sum's kernels are those of any other sum.
OF_FEW = ("value_and_grad", "vmap(grad), over all", "grad(vmap), over x", "scan(checkpoint)", "grad(grad)", "jvp")


def cells(rows, always=lambda *_: True):
    """Return the matrix's parameters: (operator, optional arguments given, implementation, transformation).

    Heavy are the cases that lack an optional argument, those that `always` leaves out, and most of those of RMSNorm and
    of operators with arguments that few models have.
    """

    def light(name, given, implementation, row):
        complete = given == OPTIONAL[name]
        is_more = bool(FORMS[name].given_extras)
        few = "rms" in name or (is_more and (FORMS[name].is_linear or implementation == "triton"))
        return complete and always(implementation, row) and (not few or row in OF_FEW)

    return [
        pytest.param(
            name,
            given,
            implementation,
            row,
            marks=() if light(name, given, implementation, row) else pytest.mark.heavy,
            id="-".join((name, given or "nothing", implementation, row)),
        )
        for (name, given), implementation, row in itertools.product(CASES, ("xla", "triton"), rows)
    ]


@functools.cache
def expected(name, given, transformation):
    function, arrays = bind(name, given, jln.reference)
    return jax.jit(lambda a: (REVERSE | FORWARD)[transformation](function, a))(arrays)


def check(name, given, transformation, **options):
    function, arrays = bind(name, given, **options)
    got = jax.jit(lambda a: (REVERSE | FORWARD)[transformation](function, a))(arrays)
    wanted = expected(name, given, transformation)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        # Sums of up to 40 terms near 10, through a second derivative. A small element of a large array is the
        # difference of large terms, and has their roundings.
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10 + 1e-12 * np.max(np.abs(b), initial=0))


@pytest.mark.parametrize(("name", "given", "implementation", "transformation"), cells(REVERSE))
def test_reverse_mode(name, given, implementation, transformation):
    check(name, given, transformation, implementation=implementation)


def always_in_forward_mode(implementation, transformation):
    """Return whether a case of forward mode is tested by default.

    The tangent is the same jnp code for every implementation, and is tested in full with "xla". With "triton" one `jvp`
    is tested, and three transformations of reverse mode, which transposes the tangent.
    """
    transposed = ("grad(vmap), over x", "grad(vmap), over all", "scan(checkpoint)", "jvp")
    return transformation in (FORWARD if implementation == "xla" else transposed)


@pytest.mark.parametrize(
    ("name", "given", "implementation", "transformation"), cells(FORWARD | REVERSE, always_in_forward_mode)
)
def test_forward_mode(name, given, implementation, transformation):
    check(name, given, transformation, implementation=implementation, forward_mode=True)


# One operator for each kind of operand.
KINDS = ("add_layer_norm", "rms_norm_gated", "rms_norm_add_rms_norm, gate", "add_layer_norm_linear, x_bias and gate")


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_central_differences(name, forward_mode):
    """First and second derivatives agree with central differences."""
    function, arrays = bind(name, OPTIONAL[name], implementation="xla", forward_mode=forward_mode)
    check_grads(jax.jit(function), one_row(arrays), order=2, **({} if forward_mode else {"modes": ["rev"]}))


@pytest.mark.parametrize("name", KINDS)
def test_without_forward_mode_the_error_names_it(name):
    function, (x, *rest) = bind(name, OPTIONAL[name])

    def f(x):
        return first(function)(x, *rest)

    linearized = lambda f, v, t: jax.linearize(f, *v)[1](*t)  # noqa: E731
    mapped = lambda f, v, t: jax.vmap(lambda v, t: jax.jvp(f, v, t), axis_size=2, in_axes=None)(v, t)  # noqa: E731
    for differentiate in (jax.jvp, lambda f, v, t: jax.jvp(jax.jit(f), v, t), linearized, mapped):
        with pytest.raises(TypeError, match="forward_mode=True"):
            differentiate(f, (x,), (x,))
    with pytest.raises(TypeError, match="forward_mode=True"):
        jax.jvp(jax.vmap(jln.rms_norm), (x,), (x,))


def test_a_linear_transpose_in_forward_mode():
    x, kernel = workbench.normal(0, (6, 8), "float64"), workbench.normal(1, (8, 4), "float64")

    def transposed(module, kernel, **options):
        return jax.linear_transpose(lambda k: module.rms_norm_linear(x, None, k, **options), kernel)(jnp.cos(x[:, :4]))

    chex.assert_trees_all_close(transposed(jln, kernel, forward_mode=True), transposed(jln.reference, kernel))


@pytest.mark.parametrize("name", KINDS)  # few: `jax.checking_leaks` collects garbage at the end of every trace
def test_no_tracer_leaks(name, implementation):
    """No tracer outlives its trace.

    A callback or a cache's key that kept one would keep the whole trace alive, and `jax.checking_leaks` would raise.
    """
    function, arrays = bind(name, OPTIONAL[name], implementation=implementation)
    with jax.checking_leaks():
        jax.jit(lambda a: REVERSE["value_and_grad"](function, a))(arrays)
        jax.jit(lambda a: REVERSE["vmap(grad), over x"](function, a))(arrays)
