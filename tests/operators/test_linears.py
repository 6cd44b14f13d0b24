"""Tests of what only the operators with a Linear have: features, a kernel, a precision, and what they keep."""

import chex
import jax
import jax.numpy as jnp
import pytest

import jln
import workbench
from workbench import LINEAR_OPERATORS

OPERATOR = LINEAR_OPERATORS["layer_norm_linear"]


def arguments(operator=OPERATOR, rows=(4,), features=(6,)):
    return workbench.arguments(operator, (*rows, 9), "float64", features=features)


# First x of one axis, without rows' axes; then three axes of rows and three of features.
@pytest.mark.parametrize(("rows", "features"), [((), (6,)), ((2, 1, 3), (2, 3, 2))], ids=str)
@pytest.mark.parametrize("name", LINEAR_OPERATORS)
def test_axes_of_rows_and_of_features(name, rows, features, implementation):
    operator = LINEAR_OPERATORS[name]
    operands = arguments(operator, rows, features)
    everything = [i for i, a in enumerate(operands) if a is not None]

    def of(**options):
        def loss(*a):
            return sum(jnp.sum(jnp.sin(r)) for r in jax.tree.leaves(operator(*a, **options)))

        return jax.jit(jax.value_and_grad(loss, everything))(*operands)

    chex.assert_trees_all_close(of(implementation=implementation), of(module=jln.reference), rtol=1e-11, atol=1e-11)


def test_no_operand_is_written_out_over_a_batch():
    """A vmap over x alone is one product of a longer x, without a copy of the kernel for every example."""
    x, *parameters = workbench.arguments(OPERATOR, (64, 8, 32), "float32", features=(16,))
    function = jax.vmap(lambda x: jln.layer_norm_linear(x, *parameters, implementation="xla"))
    text = jax.jit(function).lower(x).as_text()
    assert text.count("dot_general") == 1 and "64x32x16" not in text


@pytest.mark.parametrize("features", [(24,), (2, 12)])
def test_only_x_is_kept_of_its_size(features, implementation):
    """No array of x's size is kept between forward and backward but x: no z, no y.

    Beside x there are the kernel, the norm's parameters in x's rank, mean and rstd. The bias is not kept.
    """
    operands = workbench.arguments(OPERATOR, (64, 32), "bfloat16", features=features, parameter_dtype="float32")
    _, pullback = jax.vjp(lambda *a: OPERATOR(*a, implementation=implementation), *operands)
    held = sorted((a.dtype.name, a.shape) for a in jax.tree.leaves(pullback) if a.size)
    parameters = [("float32", (1, 32)), ("float32", (1, 32)), ("float32", (32, *features))]
    statistics = [("float32", (64, 1)), ("float32", (64, 1))]
    assert held == sorted([("bfloat16", (64, 32)), *parameters, *statistics])


def test_x_is_kept_as_it_is(implementation):
    """The arrays x and kernel themselves are kept between forward and backward, not copies of them.

    New are only the norm's parameters in x's rank, and the mean and rstd of each row.
    """
    operands = workbench.arguments(OPERATOR, (64, 32), "bfloat16", features=(24,), parameter_dtype="float32")

    def held(*operands):
        return jax.tree.leaves(jax.vjp(lambda *a: OPERATOR(*a, implementation=implementation), *operands)[1])

    jaxpr = jax.make_jaxpr(held)(*operands).jaxpr
    made = [a.aval.shape for a in jaxpr.outvars if a not in jaxpr.invars and a.aval.size]
    assert sorted(made) == [(1, 32), (1, 32), (64, 1), (64, 1)]
    x, *_, kernel, _ = jaxpr.invars
    assert {x, kernel} <= {*jaxpr.outvars}


@pytest.mark.parametrize("precision", ["highest", ("high", "default"), jax.lax.Precision.HIGH, "BF16_BF16_F32", None])
def test_precision_is_that_of_every_product(precision):
    """The precision is that of the forward's product and of the backward's two, and there is no other product."""
    x, *parameters = (jnp.asarray(a, "float32") for a in arguments())

    def step(f, *operands):
        y, pullback = jax.vjp(lambda *a: f(*a, precision=precision), *operands)
        return pullback(y)

    def asked(f):
        text = jax.jit(lambda *a: step(f, *a)).trace(x, *parameters).lower(lowering_platforms=("cuda",)).as_text()
        return sorted(line.split(", precision")[-1].split(" :")[0] for line in text.splitlines() if "dot_gen" in line)

    ours = asked(lambda *a, **o: jln.layer_norm_linear(*a, implementation="xla", **o))
    assert len(ours) == 3 and ours == asked(jln.reference.layer_norm_linear)


def test_precision_may_be_the_default_of_the_moment():
    x, *parameters = (jnp.asarray(a, "float32") for a in arguments())
    with jax.default_matmul_precision("highest"):
        text = str(jax.make_jaxpr(jln.layer_norm_linear)(x, *parameters))
    assert "HIGHEST" in text


def test_precision_is_understood_once(monkeypatch):
    """A second eager call with a precision traces nothing to learn what the precision means."""
    x, kernel = jnp.ones((3, 4)), jnp.ones((4, 5))
    jln.layer_norm_linear(x, None, None, kernel, precision="highest")
    monkeypatch.setattr(jax, "make_jaxpr", None)
    jln.layer_norm_linear(x, None, None, kernel, precision="highest")
