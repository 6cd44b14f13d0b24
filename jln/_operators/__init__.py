"""The public operators: their signatures and docstrings, checks, and one call each of the junction."""
