"""LayerNorm and RMSNorm, alone, with a residual added first, and gated.

operator.py: the public functions. arguments.py: what they are given. rules.py: what they are made of, and their
derivatives. signature.py: what goes in, is kept, comes out.
formulas.py: the derivation, in jnp. kernels.py, access.py, launcher.py, tiles.py: the same on a GPU.
"""

from jln._norm import tiles  # noqa: F401  whose choices a tuning file may have, whatever runs first
