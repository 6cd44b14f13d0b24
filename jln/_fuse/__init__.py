"""`fuse`: norms of any program, found by what they compute, as operators."""
