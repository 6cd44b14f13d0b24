"""Tests of bad arguments: the type of the error, and that it names the argument and what was expected."""

import inspect

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jln
from catalogue import OPERATORS


class Holder:
    """A stand-in for an array, as Flax's variables are."""

    def __init__(self, value):
        self.value = value

    def __jax_array__(self):
        return self.value


def ones(*shape, dtype="float32"):
    return jnp.ones(shape, dtype)


SHAPES = {"x": (2, 4, 8), "residual": (2, 4, 8), "z": (2, 4, 8), "kernel": (8, 3), "bias": (3,)}
SHAPES |= dict.fromkeys(("scale", "offset", "x_scale", "x_bias", "gate"), (8,))
X = ones(*SHAPES["x"])
N = np.ones(SHAPES["x"], "float32")
DTYPE = "x must have one of the dtypes float16, bfloat16, float32, float64; got "
NUMBER = "epsilon must be a static Python or NumPy number; got "
OF_H = r" must have shape \(8,\), that of x's axes \(2,\), or x's rank, with 1 or x's size on every other axis"
OF_NORMS = ("scale", "offset", "x_scale")
OF_KERNEL = r"kernel must have shape \(8, \*features\), .*one axis of features or more; got float32"

# Wrong arguments, the error's type and its words. Every operator that takes all of these arguments must raise it.
CASES = [
    *(({n: ones(*s, dtype="int32")}, TypeError, f"{n} must have one of .*got int32") for n, s in SHAPES.items()),
    *(({n: "1"}, TypeError, f"{n} must be an array; got str") for n in SHAPES),
    *(({n: 1.0}, TypeError, f"{n} must be an array; got float") for n in SHAPES if n != "gate"),
    ({"residual": ones(8)}, ValueError, r"residual must have shape \(2, 4, 8\), that of x; got float32\[8\]"),
    ({"z": ones(2, 4, 1)}, ValueError, r"z must have shape \(2, 4, 8\), that of x; got float32\[2,4,1\]"),
    ({"z": None}, TypeError, "z must be an array; got NoneType"),
    ({"kernel": None}, TypeError, "kernel must be an array; got NoneType"),
    # Odd arrays.
    ({"x": [1.0, 2.0]}, TypeError, "x must be an array; got list"),
    ({"x": jax.ShapeDtypeStruct((4, 8), "float32")}, TypeError, "x must be an array; got ShapeDtypeStruct"),
    ({"x": Holder([1.0, 2.0])}, TypeError, "x must be an array; got list"),
    ({"x": ones(8, dtype="float8_e4m3fn")}, TypeError, DTYPE + r"float8_e4m3fn\[8\]"),
    ({"x": N.astype(N.dtype.newbyteorder())}, TypeError, DTYPE + r"float32\[2,4,8\] in another byte order"),
    ({"x": N.astype(np.longdouble)}, TypeError, DTYPE + r"float(128|96|64)\["),
    ({"x": N.astype(object)}, TypeError, DTYPE + r"object\["),
    ({"x": np.ma.masked_array(N, N > 0)}, TypeError, r"x must be an array without a mask; got .*: x\.filled\(\.\.\.\)"),
    # Shapes.
    ({"x": jnp.float32(1)}, ValueError, "x must have at least one axis; got a scalar"),
    ({"x": ones(4, 0)}, ValueError, r"axis -1 of shape \(4, 0\) is empty"),
    *(({n: ones(9)}, ValueError, rf"{n}{OF_H}; got float32\[9\] for x float32\[2,4,8\]") for n in OF_NORMS),
    ({"scale": ones(1, 4, 8)[None]}, ValueError, rf"scale{OF_H}; got float32\[1,1,4,8\]"),
    ({"scale": ones(3, 1, 8)}, ValueError, rf"scale{OF_H}; got float32\[3,1,8\]"),
    ({"scale": ones(4, 8), "axis": (2, 1)}, ValueError, r"scale must have shape \(8, 4\), that of x's axes \(2, 1\)"),
    ({"gate": ones(9)}, ValueError, rf"gate{OF_H} and on all of \(2,\) together; got float32\[9\] for x"),
    ({"gate": ones(3, 1, 8)}, ValueError, r"gate must have .*got float32\[3,1,8\]"),
    ({"gate": ones(2, 1, 4)}, ValueError, r"gate must have .*got float32\[2,1,4\]"),
    ({"x_bias": ones(9)}, ValueError, r"x_bias must have shape \(8,\), that of x's normalised axes; got float32\[9\]"),
    ({"x_bias": ones(2, 1, 8)}, ValueError, r"x_bias must have shape \(8,\).*got float32\[2,1,8\]"),
    ({"kernel": ones(9, 3)}, ValueError, OF_KERNEL + r"\[9,3\] for x"),
    ({"kernel": ones(8)}, ValueError, OF_KERNEL + r"\[8\]"),
    ({"bias": ones(4)}, ValueError, r"bias must have shape \(3,\), that of kernel's axes after .*; got float32\[4\]"),
    ({"bias": ones(3), "kernel": ones(8, 1, 3)}, ValueError, r"bias must have shape \(1, 3\)"),
    # Numbers.
    ({"gate": True}, TypeError, "gate must be an array; got bool"),
    *(({"gate": a}, ValueError, "gate must be a number that float32 holds; got") for a in (1e39, np.nan)),
    ({"gate": 10**400}, ValueError, "gate must be a number that float32 holds"),
    ({"residual": None, "gate": ones(8), "x_bias": None}, ValueError, "gate needs a residual, .*; got residual=None"),
    ({"residual": None, "x_bias": ones(8)}, ValueError, "x_bias needs a residual, to which x is added with it"),
    ({"epsilon": -1e-6}, ValueError, "epsilon must be finite and not negative; got -1e-06"),
    ({"epsilon": 10**400}, ValueError, "epsilon must be finite"),
    ({"epsilon": 1e308}, ValueError, r"at most 3.4028235e\+38, the largest float32, in which float32.* is normalised"),
    ({"epsilon": 3.5e38, "x": X.astype("bfloat16")}, ValueError, r"at most 3.4028235e\+38, .* in which bfloat16"),
    ({"epsilon": jnp.float32(1e-6)}, TypeError, NUMBER),
    ({"epsilon": np.array(0.1)}, TypeError, NUMBER + r"array\(0.1\) of type ndarray"),
    ({"epsilon": True}, TypeError, NUMBER + "True of type bool"),
    # Other static arguments.
    ({"zero_centered_scale": 1}, TypeError, "zero_centered_scale must be a static bool; got 1"),
    ({"zero_centered_scale": True}, ValueError, "zero_centered_scale=True needs a scale; got .*scale=None"),
    *(({"norm_before_gate": a}, TypeError, "norm_before_gate must be a static bool") for a in (1, jnp.asarray(True))),
    ({"implementation": "cuda"}, ValueError, "implementation must be None, 'triton' or 'xla'; got 'cuda'"),
    ({"axis": 3}, ValueError, r"axis 3 is out of range for x of shape \(2, 4, 8\)"),
    ({"axis": (2, -1)}, ValueError, r"axis names an axis of x twice: \(2, -1\)"),
    ({"axis": ()}, ValueError, "axis must name at least one axis"),
    *(({"axis": a}, TypeError, "axis must be a static int or tuple of ints") for a in (1.0, True, jnp.asarray(1))),
    ({"dtype": "int32"}, TypeError, "dtype must be one of float16.*got int32"),
    ({"dtype": "bogus"}, TypeError, "dtype must be a dtype or None; got 'bogus'"),
    ({"precision": "bogus"}, ValueError, "(?s)Precision argument must be one of.*got bogus"),
    ({"remat": 1}, TypeError, "remat must be a static bool"),
    ({"remat": True, "forward_mode": True}, ValueError, "remat=True is of reverse mode"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(CASES)))
def test_bad_arguments(case):
    wrong, error, message = CASES[case]
    takes = {name: inspect.signature(o.function).parameters for name, o in OPERATORS.items()}
    names = [name for name in OPERATORS if wrong.keys() <= takes[name].keys()]
    assert names
    for name in names:
        needed = {n: None for n, p in takes[name].items() if p.default is p.empty}
        needed |= {n: ones(*SHAPES[n]) for n in ("x", "residual", "z", "kernel") if n in takes[name]}
        if "x" in wrong and isinstance(wrong["x"], jax.Array):
            needed |= {n: wrong["x"] for n in ("residual", "z") if n in needed}
        with pytest.raises(error, match=message):
            OPERATORS[name].function(**needed | wrong)


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
    x, scale = ones(*shape), ones(*of_scale)

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


def test_odd_arrays_that_are_arrays_all_the_same():
    """Subclasses of NumPy's array, other memory layouts, stand-ins for arrays and ml_dtypes' bfloat16 are accepted."""
    arrays = {n: np.random.default_rng(0).standard_normal(s).astype("float32") for n, s in SHAPES.items()}
    kinds = (
        lambda a: a.view(np.recarray),
        lambda a: np.asfortranarray(np.repeat(a, 2, 0)[::2]),
        lambda a: Holder(Holder(a)),
        lambda a: a.astype(ml_dtypes.bfloat16),
    )
    for name in ("add_layer_norm_linear", "rms_norm_add_rms_norm", "rms_norm_gated"):
        takes = [n for n in OPERATORS[name].takes if n in SHAPES]
        expected = OPERATORS[name].function(**{n: arrays[n] for n in takes})
        for make in kinds:
            got = OPERATORS[name].function(**{n: make(arrays[n]) for n in takes})
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(a.astype("float32"), b, rtol=0, atol=0.2 if a.dtype != b.dtype else 0)


def test_what_is_almost_an_error():
    """Numbers of NumPy and ml_dtypes count as static, and epsilon may be zero or very large.

    Its largest value is that of the dtype in which x is normalised.
    """
    for epsilon in (ml_dtypes.bfloat16(0.25), ml_dtypes.float8_e5m2(0.25), np.longdouble(0.25), np.float16(0.25)):
        np.testing.assert_array_equal(jln.rms_norm(X, epsilon=epsilon), jln.rms_norm(X, epsilon=0.25))
    jln.layer_norm(X, epsilon=float(np.finfo("float32").max))
    wide = np.float64([[1e150, -1e150]])  # whose variance is epsilon's size
    np.testing.assert_allclose(jln.layer_norm(wide, epsilon=1e300), np.sign(wide) / np.sqrt(2), rtol=1e-12)
    jln.add_layer_norm(X, X.astype("float64"), epsilon=1e308)
    jln.layer_norm(X, axis=np.array(1), epsilon=-0.0)
    jln.layer_norm(X, axis=(np.int32(-1),), epsilon=0, zero_centered_scale=False)
    for scales in ((ones(8), None), (None, ones(8))):  # zero_centered_scale applies to the scale that is there
        jln.rms_norm_add_rms_norm(X, X, *scales, zero_centered_scale=True)


def test_float64_without_x64():
    """An x of float64 raises while jax_enable_x64 is off, and later calls are not affected."""
    x = jnp.ones((3, 4), "float64")
    with jax.enable_x64(False), pytest.raises(TypeError, match=r"x is float64\[3,4\].*jax_enable_x64"):
        jln.layer_norm(x)
    assert jln.layer_norm(x).dtype == "float64"
    with jax.enable_x64(False):
        assert jln.layer_norm(jnp.ones((3, 4))).dtype == "float32"
