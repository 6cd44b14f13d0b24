"""Fixtures of the tests of `jln.fuse`."""

import pytest


@pytest.fixture
def products_on_a_cpu(monkeypatch):
    """Have `jax.nn.scaled_dot_general` run on a CPU."""
    from eight_bit_products import multiply_on_a_cpu  # with Flax, which few tests here need

    monkeypatch.setattr("jax._src.cudnn.scaled_matmul_stablehlo.scaled_matmul_wrapper", multiply_on_a_cpu)
