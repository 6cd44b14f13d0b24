"""The Linears behind the norm: files are named as in `jln._junction`."""
