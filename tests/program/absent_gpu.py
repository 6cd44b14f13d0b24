"""The condition of this rung's tests: modules that import it are skipped if nothing compiles for an absent GPU."""

import importlib.util

import jax
import pytest

import program
from jln._triton import lowering

if not program._folders("jax_plugins.xla_cuda13") or importlib.util.find_spec("jax_triton") is None:
    pytest.skip('compiling for an absent GPU needs pip install -e ".[cuda13]"', allow_module_level=True)

lowering._jax_triton()  # before a test imports it, which empties TRITON_CACHE_DIR: nothing compiles with an empty one


def struct(*shape, dtype="bfloat16", sharding=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def triton_kernels(report):
    return [k for k in report.kernels if k.is_triton]
