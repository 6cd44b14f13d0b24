"""LayerNorm and RMSNorm, alone, with a residual added in front or behind, and gated.

operator.py: the public functions. arguments.py: their arguments, checked and laid out. rules.py: the operations that
they are made of, and their derivatives. signature.py: records of what goes in, is kept, and comes out. formulas.py: the
derivation, in jnp. kernels.py, access.py, launcher.py, tiles.py: the same operations on a GPU.
"""

from jln._norm import tiles  # noqa: F401  whose choices a tuning file may have, whatever runs first
