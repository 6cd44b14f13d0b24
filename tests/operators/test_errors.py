"""Tests of bad arguments: the type of the error, and that it names the argument and what was expected."""

import fractions

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jln
from catalogue import FORMS, OPERATORS

X = jnp.ones((4, 8), "float32")
SCALE = jnp.ones(8, "float32")

# Cases for all operators, as functions of x and a scale.
CASES = {
    "x is not an array": (TypeError, r"x must be an array; got list", lambda f: f([1.0, 2.0])),
    "x is an integer array": (TypeError, r"x must have one of the dtypes float16.*got int32\[4,8\]",
                              lambda f: f(jnp.ones((4, 8), "int32"))),
    "x is text": (TypeError, r"x must have one of the dtypes .*got str", lambda f: f(np.array(["a"]))),
    "x is complex": (TypeError, r"x must have .*got complex64\[8\]", lambda f: f(jnp.ones(8, "complex64"))),
    "x is float8": (TypeError, r"x must have .*got float8_e4m3fn\[8\]", lambda f: f(jnp.ones(8, "float8_e4m3fn"))),
    "x is a scalar": (ValueError, r"x must have at least one axis", lambda f: f(jnp.float32(1))),
    "rows are empty": (ValueError, r"axis -1 of shape \(4, 0\) is empty", lambda f: f(jnp.ones((4, 0)))),
    "scale is too long": (ValueError, r"scale must have shape \(8,\), that of x's .*; got float32\[9\]",
                          lambda f: f(X, jnp.ones(9, "float32"))),
    "scale has another rank": (ValueError, r"scale must have shape \(8,\).*got float32\[1,4,8\]",
                               lambda f: f(X, X[None])),
    "scale has another number of examples": (ValueError, r"scale must have shape \(8,\), .*or x's rank, with 1 or x's "
                                             r"size on every other axis; got float32\[2,8\] for x float32\[4,8\]",
                                             lambda f: f(X, X[:2])),
    "scale is one number for each row": (ValueError, r"scale must have .*got float32\[4,1\]",
                                         lambda f: f(X, X[:, :1])),
    "scale is an integer array": (TypeError, r"scale must have one of the dtypes", lambda f: f(X, jnp.ones(8, "int8"))),
    "scale is a number": (TypeError, r"scale must be an array; got float", lambda f: f(X, 1.0)),
    "epsilon is negative": (ValueError, r"epsilon must be finite and not negative; got -1e-06",
                            lambda f: f(X, epsilon=-1e-6)),
    "epsilon is NaN": (ValueError, r"epsilon must be finite", lambda f: f(X, epsilon=float("nan"))),
    "epsilon is complex": (TypeError, r"epsilon must be a static Python or NumPy number",
                           lambda f: f(X, epsilon=np.complex64(1e-6))),
    "epsilon is an array": (TypeError, r"epsilon must be a static Python or NumPy number",
                            lambda f: f(X, epsilon=jnp.float32(1e-6))),
    "epsilon is too large": (ValueError, r"epsilon must be finite", lambda f: f(X, epsilon=10**400)),
    "epsilon is too large for float32": (ValueError, r"epsilon must be at most 3.4028235e\+38, the largest float32, in "
                                         r"which float32.* is normalised; got 1e\+308", lambda f: f(X, epsilon=1e308)),
    "epsilon is too large in 16 bits": (ValueError, r"at most 3.4028235e\+38, the largest float32, in which bfloat16",
                                        lambda f: f(X.astype("bfloat16"), epsilon=3.5e38)),
    "epsilon is an array of NumPy's": (TypeError, r"epsilon must be .*got array\(0.1\) of type ndarray",
                                       lambda f: f(X, epsilon=np.array(0.1))),
    "epsilon is a fraction": (TypeError, r"epsilon must be .*got Fraction\(1, 9\) of type Fraction",
                              lambda f: f(X, epsilon=fractions.Fraction(1, 9))),
    "epsilon is a bool": (TypeError, r"epsilon must be .*got True of type bool", lambda f: f(X, epsilon=True)),
    "epsilon is text": (TypeError, r"epsilon must be a static Python or NumPy number", lambda f: f(X, epsilon="1e-6")),
    "epsilon is traced": (TypeError, r"epsilon must be a static Python or NumPy number",
                          lambda f: jax.jit(lambda e: f(X, epsilon=e))(0.1)),
    "zero_centered_scale is a number": (TypeError, r"zero_centered_scale must be a static bool; got 1",
                                        lambda f: f(X, SCALE, zero_centered_scale=1)),
    "zero_centered_scale without a scale": (ValueError, r"zero_centered_scale=True needs a scale",
                                            lambda f: f(X, zero_centered_scale=True)),
    "implementation is unknown": (ValueError, r"implementation must be None, 'triton' or 'xla'; got 'cuda'",
                                  lambda f: f(X, implementation="cuda")),
    "implementation is no text": (ValueError, r"implementation must be None", lambda f: f(X, implementation=True)),
}  # fmt: skip
AXES = {
    "scale's axes are in another order": (ValueError, r"scale must have shape \(5, 4\), that of x's axes \(2, 1\)",
                                          lambda f: f(jnp.ones((3, 4, 5)), jnp.ones((4, 5)), axis=(2, 1))),
    "axis is too large": (ValueError, r"axis 2 is out of range for x of shape \(4, 8\)", lambda f: f(X, axis=2)),
    "axis is too small": (ValueError, r"axis -3 is out of range", lambda f: f(X, axis=-3)),
    "axis comes twice": (ValueError, r"axis names an axis of x twice: \(1, -1\)", lambda f: f(X, axis=(1, -1))),
    "axis is empty": (ValueError, r"axis must name at least one axis", lambda f: f(X, axis=())),
    "axis is a float": (TypeError, r"axis must be a static int or tuple of ints; got 1.0", lambda f: f(X, axis=1.0)),
    "axis is a bool": (TypeError, r"axis must be a static int", lambda f: f(X, axis=True)),
    "axis is None": (TypeError, r"axis must be a static int", lambda f: f(X, axis=None)),
    "axis is traced": (TypeError, r"axis must be a static int", lambda f: jax.jit(lambda a: f(X, axis=a))(1)),
}  # fmt: skip
# Cases for the operators with a Linear, as functions of x, a scale, a kernel and a bias.
LINEARS = {
    "kernel is too long": (ValueError, r"kernel must have shape \(8, \*features\).*got float32\[9,3\] for x",
                           lambda f: f(X, P, jnp.ones((9, 3), "float32"))),
    "kernel is transposed": (ValueError, r"kernel must have .*got float32\[3,8\]", lambda f: f(X, P, K.T)),
    "kernel has one axis": (ValueError, r"kernel must have .*one axis of features or more; got float32\[8\]",
                            lambda f: f(X, P, P)),
    "kernel is a scalar": (ValueError, r"kernel must have .*got float32\[\]", lambda f: f(X, P, jnp.float32(1))),
    "kernel is None": (TypeError, r"kernel must be an array; got NoneType", lambda f: f(X, P, None)),
    "kernel is an integer array": (TypeError, r"kernel must have one of the dtypes.*got int32\[8,3\]",
                                   lambda f: f(X, P, K.astype("int32"))),
    "bias is too long": (ValueError, r"bias must have shape \(3,\), that of kernel's axes after.*got float32\[4\]",
                         lambda f: f(X, P, K, jnp.ones(4, "float32"))),
    "bias is not of the features' shape": (ValueError, r"bias must have shape \(1, 3\)",
                                           lambda f: f(X, P, K[:, None], jnp.ones(3, "float32"))),
    "bias is an integer array": (TypeError, r"bias must have one of the dtypes",
                                 lambda f: f(X, P, K, jnp.ones(3, "int8"))),
    "precision is unknown": (ValueError, r"(?s)Precision argument must be one of.*got bogus",
                             lambda f: f(X, P, K, precision="bogus")),
    "remat is a number": (TypeError, "remat must be a static bool", lambda f: f(X, P, K, remat=1)),
    "remat in forward mode": (ValueError, "remat=True is of reverse mode",
                              lambda f: f(X, P, K, remat=True, forward_mode=True)),
    "precision is a number": (ValueError, r"Precision argument must be one of", lambda f: f(X, P, K, precision=3)),
}  # fmt: skip
K = jnp.ones((8, 3), "float32")
P = SCALE


def given(entry):
    """Return the operator as a function of x and of what the cases give beside x.

    The residual and z are x itself, or a scalar where x is no array of JAX.
    """

    def call(x, scale=None, kernel=K, bias=None, **options):
        named = {"x": x, "residual": x if isinstance(x, jax.Array) else jnp.ones(()), "scale": scale, "offset": None}
        if x is not X and kernel is K:  # as many rows as x has columns
            kernel = jnp.ones((*(getattr(x, "shape", ()) or (8,))[-1:], 3), "float32")
        named |= {"kernel": kernel, "bias": bias, "z": named["residual"], "x_scale": None}
        return entry.function(**{name: named[name] for name in entry.names}, **options)

    return call


def runs():
    for name, entry in OPERATORS.items():
        cases = CASES | (LINEARS if entry.is_linear else AXES)
        for case in cases:
            yield pytest.param(given(entry), *cases[case], id=f"{name}-{case}")


@pytest.mark.parametrize("name", ["layer_norm_add", "rms_norm_add", "rms_norm_add_rms_norm"])
def test_a_residual_behind_a_norm(name):
    operator = getattr(jln, name)
    with pytest.raises(TypeError, match=r"residual must be an array; got NoneType"):
        operator(X, None)
    with pytest.raises(ValueError, match=r"residual must have shape \(4, 8\), that of x; got float32\[8\]"):
        operator(X, SCALE)
    with pytest.raises(TypeError, match=r"residual must have one of the dtypes .*got int32\[4,8\]"):
        operator(X, X.astype("int32"))


def test_the_scale_of_x_on_both_sides():
    message = r"x_scale must have shape \(8,\), that of x's axes \(1,\), .*; got float32\[9\] for x float32\[4,8\]"
    with pytest.raises(ValueError, match=message):
        jln.rms_norm_add_rms_norm(X, X, jnp.ones(9, "float32"))
    with pytest.raises(TypeError, match=r"x_scale must be an array; got float"):
        jln.rms_norm_add_rms_norm(X, X, 1.0)
    with pytest.raises(ValueError, match=r"zero_centered_scale=True needs a scale"):
        jln.rms_norm_add_rms_norm(X, X, zero_centered_scale=True)
    for scales in ((SCALE, None), (None, SCALE)):  # zero_centered_scale applies to the scale that is there
        jln.rms_norm_add_rms_norm(X, X, *scales, zero_centered_scale=True)


@pytest.mark.parametrize(("function", "error", "message", "call"), list(runs()))
def test_bad_arguments(function, error, message, call):
    with pytest.raises(error, match=message):
        call(function)


def test_offset():
    with pytest.raises(ValueError, match=r"offset must have shape \(8,\).*got float32\[4\]"):
        jln.layer_norm(X, SCALE, jnp.ones(4, "float32"))
    with pytest.raises(TypeError, match=r"offset must have one of the dtypes"):
        jln.layer_norm(X, SCALE, jnp.ones(8, "int32"))


@pytest.mark.parametrize("function", [jln.add_layer_norm, jln.add_rms_norm])
def test_residual(function):
    with pytest.raises(ValueError, match=r"residual must have shape \(4, 8\), that of x; got float32\[8\]"):
        function(X, SCALE)
    for name in ("x_bias", "gate"):
        with pytest.raises(
            ValueError, match=f"{name} needs a residual, to which x is added with it; got residual=None"
        ):
            function(X, None, **{name: SCALE})
    with pytest.raises(TypeError, match=r"residual must have one of the dtypes"):
        function(X, jnp.ones((4, 8), "int32"))


def test_gated_norms():
    with pytest.raises(ValueError, match=r"z must have shape \(4, 8\), that of x; got float32\[8\]"):
        jln.rms_norm_gated(X, SCALE)
    with pytest.raises(ValueError, match=r"z must have shape \(4, 8\), that of x; got float32\[4,1\]"):
        jln.rms_norm_gated(X, jnp.ones((4, 1), "float32"))
    with pytest.raises(TypeError, match=r"z must be an array; got NoneType"):
        jln.rms_norm_gated(X, None)
    with pytest.raises(TypeError, match=r"z must have one of the dtypes .*got int32\[4,8\]"):
        jln.rms_norm_gated(X, jnp.ones((4, 8), "int32"))
    for wrong in (1, None, "yes", jnp.asarray(True)):
        with pytest.raises(TypeError, match="norm_before_gate must be a static bool"):
            jln.rms_norm_gated(X, X, norm_before_gate=wrong)


# Cases for the functions that add x and a residual, both of the shape (2, 4, 8).
JUNCTION = {
    "x_bias is too long": (ValueError, r"x_bias must have shape \(8,\), that of x's normalised axes; got float32\[9\]",
                           {"x_bias": jnp.ones(9, "float32")}),
    "x_bias is each example's": (ValueError, r"x_bias must have shape \(8,\).*got float32\[2,1,8\]",
                                 {"x_bias": jnp.ones((2, 1, 8), "float32")}),
    "x_bias is a number": (TypeError, r"x_bias must be an array; got float", {"x_bias": 1.0}),
    "x_bias is an integer array": (TypeError, r"x_bias must have one of the dtypes .*got int32\[8\]",
                                   {"x_bias": jnp.ones(8, "int32")}),
    "gate is too long": (ValueError, r"gate must have shape \(8,\), that of x's axes \(2,\), or x's rank, "
                         r"with 1 or x's size on every other axis and on all of \(2,\) together; got float32\[9\] for "
                         r"x float32\[2,4,8\]", {"gate": jnp.ones(9, "float32")}),
    "gate has another number of examples": (ValueError, r"gate must have .*got float32\[3,1,8\]",
                                            {"gate": jnp.ones((3, 1, 8), "float32")}),
    "gate has part of H": (ValueError, r"gate must have .*got float32\[2,1,4\]",
                           {"gate": jnp.ones((2, 1, 4), "float32")}),
    "gate lacks an axis": (ValueError, r"gate must have .*got float32\[2,4\]", {"gate": jnp.ones((2, 4), "float32")}),
    "gate is an integer array": (TypeError, r"gate must have one of the dtypes .*got int32\[8\]",
                                 {"gate": jnp.ones(8, "int32")}),
    "gate is a mask": (TypeError, r"gate must have one of the dtypes .*got bool\[2,1,1\]",
                       {"gate": jnp.ones((2, 1, 1), bool)}),
    "gate is a bool": (TypeError, r"gate must be an array; got bool", {"gate": True}),
    "gate is complex": (TypeError, r"gate must be an array; got complex", {"gate": 1j}),
    "gate is text": (TypeError, r"gate must be an array; got str", {"gate": "0.5"}),
    "gate is beyond float32": (ValueError, r"gate must be a number that float32 holds; got 1e\+39", {"gate": 1e39}),
    "gate is beyond every float": (ValueError, r"gate must be a number that float32 holds", {"gate": 10**400}),
    "gate is no number": (ValueError, r"gate must be a number that float32 holds; got nan", {"gate": float("nan")}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "case"),
    [(o.name, c) for o in OPERATORS.values() for c in JUNCTION if {*JUNCTION[c][2]} <= {*o.extras}],
)
def test_x_bias_and_gate(name, case):
    error, message, wrong = JUNCTION[case]
    x, named = jnp.ones((2, 4, 8), "float32"), {"scale": SCALE, "offset": None, "kernel": K, "bias": None}
    named |= {"x": x, "residual": x, "x_scale": SCALE}
    with pytest.raises(error, match=message):
        OPERATORS[name].function(**{n: named[n] for n in OPERATORS[name].names}, **wrong)


# What neither kernels nor eight bits take: the words of the error, the shape of x, its axes, and the scale's shape.
LEFT_TO_XLA = {
    "the first axis": (r"takes rows whose elements lie side by side, and axis=\(0,\) of x \(3, 8\) are not its last: "
                       r"write jnp.moveaxis\(x, \(0,\), \(-1,\)\), or leave it out", (3, 8), 0, (3,)),
    "axes apart": (r"takes rows .*not adjacent: .*moveaxis\(x, \(2, 0\), \(-2, -1\)\)", (3, 4, 8), (2, 0), (8, 3)),
    "a scale behind other rows": (r"takes parameters that vary along x's first axes, or along the one in front of the "
                                  r"normalised axis; got scale \(1, 4, 1, 8\) for x \(3, 4, 5, 8\): leave it out",
                                  (3, 4, 5, 8), -1, (1, 4, 1, 8)),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT_TO_XLA)
def test_what_only_xla_takes(case):
    """Kernels that are asked for by name raise while the call is traced, in forward mode too; XLA does not.

    Eight bits raise where the axes are apart, or the parameters are no example's.
    """
    message, shape, axis, of_scale = LEFT_TO_XLA[case]
    x, scale = jnp.ones(shape, "float32"), jnp.ones(of_scale, "float32")

    def call(**options):
        return jax.eval_shape(lambda: jln.rms_norm(x, scale, axis=axis, **options))

    for forward_mode in (False, True):
        with pytest.raises(ValueError, match=f"^implementation='triton' {message}"):
            call(implementation="triton", forward_mode=forward_mode)
        assert call(implementation="xla", forward_mode=forward_mode).shape == call().shape == shape
    if case == "the first axis":
        assert call(quantize=jln.Float8(1.0)).values.shape == shape
        return
    with pytest.raises(ValueError, match=f"^quantize= {message}"):
        call(quantize=jln.Float8(1.0))


@pytest.mark.parametrize(("axis", "transform"), [(1, "vmap(grad)"), (2, "vmap(grad)"), (2, "grad(vmap)")])
def test_examples_behind_rows(axis, transform):
    """Kernels by name take no examples of a vmap behind H, and none of a vmap(grad) behind rows; XLA does."""

    def gradient(x, **options):
        def loss(x):
            return jnp.sum(jln.rms_norm(x, **options))

        if transform == "vmap(grad)":
            return jax.vmap(jax.grad(loss), axis)(x)
        return jax.grad(lambda x: jnp.sum(jax.vmap(loss, axis)(x)))(x)

    x = jnp.ones((4, 3, 8) if axis == 1 else (4, 8, 3))
    with pytest.raises(ValueError, match=r"^implementation='triton' takes the examples of this vmap in front of"):
        jax.eval_shape(lambda x: gradient(x, implementation="triton"), x)
    jax.eval_shape(gradient, x)


def test_no_sum_has_no_x_bias_and_no_gate():
    for name in ("layer_norm", "rms_norm_linear"):
        with pytest.raises(TypeError, match="unexpected keyword argument 'gate'"):
            OPERATORS[name].function(X, gate=0.5)


def test_errors_come_while_tracing():
    with pytest.raises(ValueError, match="scale must have shape"):
        jax.eval_shape(jln.layer_norm, X, jax.ShapeDtypeStruct((9,), "float32"))


DTYPE = "must have one of the dtypes .*got"
# Odd arrays by what they are: how one is made of a right array, and what the error says after the argument's name.
ODD_ARRAYS = {
    "in another byte order": (lambda a: a.astype(a.dtype.newbyteorder()), DTYPE + r".* in another byte order"),
    "long": (lambda a: a.astype(np.clongdouble).real, DTYPE + r" float(128|96|64)\["),
    "of records": (lambda a: np.zeros(a.shape, [("mean", "f4"), ("n", "i4")]), DTYPE + " void64"),
    "of objects": (lambda a: a.astype(object), DTYPE + r" object\["),
    "of strings": (lambda a: a.astype(np.dtypes.StringDType()), DTYPE + " StringDType"),
    "of NumPy's integers": (lambda a: a.astype(np.int64), DTYPE + r" int64\["),
    "masked": (lambda a: np.ma.masked_array(a, a > 0), r"without a mask; got float32\[.*: {name}\.filled\(\.\.\.\)"),
    "a list": (lambda a: a.tolist(), "must be an array; got list"),
    "a shape": (lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), "must be an array; got ShapeDtypeStruct"),
    "held, in another byte order": (lambda a: Holder(a.astype(a.dtype.newbyteorder())), "in another byte order"),
    "held, and a list": (lambda a: Holder(a.tolist()), "must be an array; got list"),
}  # fmt: skip


class Holder:
    """A stand-in for an array, as Flax's variables are."""

    def __init__(self, value):
        self.value = value

    def __jax_array__(self):
        return self.value


NAMES = {entry.function: entry.names for entry in FORMS.values()}
SHAPES = {"x": (4, 8), "residual": (4, 8), "scale": (8,), "offset": (8,), "kernel": (8, 3), "bias": (3,)}
SHAPES |= {"x_bias": (8,), "gate": (8,), "z": (4, 8), "x_scale": (8,)}


def with_one(name, make):
    """Return calls without arguments, by the functions that take the argument `name`.

    In each call `make` has made this argument, and all others are as they should be.
    """
    arrays = {n: np.ones(shape, "float32") for n, shape in SHAPES.items()}
    arrays[name] = make(arrays[name])
    return {
        f: (lambda f=f, names=names: f(**{n: arrays[n] for n in names})) for f, names in NAMES.items() if name in names
    }


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("case", ODD_ARRAYS)
def test_odd_arrays(case, name):
    make, message = ODD_ARRAYS[case]
    for call in with_one(name, make).values():
        with pytest.raises(TypeError, match=f"^{name} .*{message.replace('{name}', name)}"):
            call()


@pytest.mark.parametrize("name", SHAPES)
def test_odd_arrays_that_are_arrays_all_the_same(name):
    """Subclasses of NumPy's array, other memory layouts, stand-ins for arrays and ml_dtypes' bfloat16 are accepted."""
    kinds = (
        lambda a: a.view(np.recarray),
        lambda a: np.broadcast_to(a[..., ::-1], a.shape),
        lambda a: np.asfortranarray(np.repeat(a, 2, 0)[::2]),
        lambda a: Holder(Holder(a)),
        lambda a: a.astype(ml_dtypes.bfloat16),
    )
    for make in kinds:
        for call in with_one(name, make).values():
            assert all(np.isfinite(y.astype("float32")).all() for y in jax.tree.leaves(call()))


def test_what_is_almost_an_error():
    """Numbers of NumPy and ml_dtypes count as static, and epsilon may be zero or very large.

    Its largest value is that of the dtype in which x is normalised.
    """
    jln.layer_norm(X, axis=np.int64(1), epsilon=np.float32(1e-5))
    for epsilon in (ml_dtypes.bfloat16(0.25), ml_dtypes.float8_e5m2(0.25), np.longdouble(0.25), np.float16(0.25)):
        np.testing.assert_array_equal(jln.rms_norm(X, epsilon=epsilon), jln.rms_norm(X, epsilon=0.25))
    jln.layer_norm(X, epsilon=float(np.finfo("float32").max))
    wide = np.float64([[1e150, -1e150]])  # whose variance is epsilon's size
    np.testing.assert_allclose(jln.layer_norm(wide, epsilon=1e300), np.sign(wide) / np.sqrt(2), rtol=1e-12)
    jln.add_layer_norm(X, X.astype("float64"), epsilon=1e308)
    jln.layer_norm(X, axis=np.array(1), epsilon=-0.0)
    jln.layer_norm(X, axis=(np.int32(-1),), epsilon=0, zero_centered_scale=False)


def test_float64_without_x64():
    """An x of float64 raises while jax_enable_x64 is off, and later calls are not affected."""
    x = jnp.ones((3, 4), "float64")
    with jax.enable_x64(False), pytest.raises(TypeError, match=r"x is float64\[3,4\].*jax_enable_x64"):
        jln.layer_norm(x)
    assert jln.layer_norm(x).dtype == "float64"
    with jax.enable_x64(False):
        assert jln.layer_norm(jnp.ones((3, 4))).dtype == "float32"
