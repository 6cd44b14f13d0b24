"""A norm on both sides of a sum: files are named as in `jln._junction`."""
