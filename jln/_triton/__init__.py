"""Triton kernels and their launchers. Nothing here imports triton until a kernel is launched."""
