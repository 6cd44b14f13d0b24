"""What `jln.testing` is made of."""
