"""Fixtures of all tests. Kernels run on the GPU where there is one, else in Triton's interpreter.

The interpreter must be chosen before triton is imported.
"""

import importlib.metadata
import os
import pathlib

# A container has the number that its GPU has on the machine.
HAS_GPU = any(any(pathlib.Path("/dev").glob(files)) for files in ("nvidia[0-9]*", "kfd"))
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    flags = "--xla_force_host_platform_device_count=8"
    # XLA compiles many small programs three times as fast without LLVM's optimisations and its emitters of fusions.
    # What users run has both, so `.ci/run` has some files with JLN_XLA=as_is, too.
    if os.environ.get("JLN_XLA") != "as_is":
        flags += " --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
        if importlib.metadata.version("jaxlib").startswith("0.10."):  # JAX 0.11 has no such flag
            flags += " --xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"

import jax  # noqa: E402
import pytest  # noqa: E402

pytest_plugins = ["combinations", "lost_gpu", *["memory"] * (not HAS_GPU)]  # a GPU's driver alone holds more
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(params=["xla", "triton"])
def implementation(request):
    return request.param


@pytest.fixture
def promoted_ranks():
    """Let JAX promote ranks, which other libraries rely on."""
    with jax.numpy_rank_promotion("allow"):
        yield
