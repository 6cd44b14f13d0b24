"""The core: formulas and kernels become operators that JAX can transform. It knows no operator."""
