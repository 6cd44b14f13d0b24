"""Triton kernels and their launches, with no knowledge of any operator. Nothing here imports triton until a launch."""
