"""The error that the executor raises."""


class Violation(Exception):
    """A fault of a kernel or of its launch that a GPU would let pass, or punish at random."""
