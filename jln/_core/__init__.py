"""How formulas and kernels become operators that JAX can transform: knows no operator."""
