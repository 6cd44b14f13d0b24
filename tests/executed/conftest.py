"""Fixtures of the executed kernels: programs are lowered for CUDA, which needs its plugin and no GPU.

They run by themselves, `pytest -n0 --confcutdir=tests/executed tests/executed`: tests/conftest.py chooses Triton's
interpreter.
"""

import importlib.metadata
import os

os.environ.pop("TRITON_INTERPRET", None)
os.environ["JAX_PLATFORMS"] = "cpu,cuda"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ.setdefault("JLN_CHIP", "h200")
# XLA compiles what is around the kernels, and the reference, three times as fast so. JAX 0.11 lacks the last flag.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    + " --xla_cpu_use_fusion_emitters=false" * importlib.metadata.version("jaxlib").startswith("0.10.")
)

import jax

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
