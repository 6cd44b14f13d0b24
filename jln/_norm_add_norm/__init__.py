"""A norm on both sides of a sum: files as in `jln._norm`."""
