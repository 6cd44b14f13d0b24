"""Fixtures of the executed kernels: programs are lowered for CUDA, which needs its plugin and no GPU.

They run by themselves, `pytest -n0 --confcutdir=tests/executed tests/executed`: tests/conftest.py chooses Triton's
interpreter.
"""

import os

os.environ.pop("TRITON_INTERPRET", None)
os.environ["JAX_PLATFORMS"] = "cpu,cuda"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ.setdefault("JLN_CHIP", "h200")

import jax

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
