"""The Triton kernels, which cite the numbers of the formulas."""
