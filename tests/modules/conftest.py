"""Every case compiles a few small programs of its own and runs each once: compile them fast, not well."""

import jax
import pytest


@pytest.fixture(autouse=True)
def compile_fast():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
