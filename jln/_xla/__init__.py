"""Hand-derived jnp forward and backward rules: what runs on CPU, TPU and wherever Triton cannot."""
