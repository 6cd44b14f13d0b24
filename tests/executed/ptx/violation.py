"""What the executor raises."""


class Violation(Exception):
    """Something in a kernel or in its launch that a GPU would let pass, or punish at random."""
