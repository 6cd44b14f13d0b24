"""Ways to break the code, and the tests that must notice.

Each is one small slip of the kind that a person makes: a term dropped, a mask swapped, a bound off by one, a wrong
axis, sums in too few bits. `old` must be in the file exactly once.
"""

from both_sides import NORMS
from compiled import COMPILED
from eight_bit_linears import EIGHT_BIT_LINEARS
from entries import ENTRIES
from few_features import FEW_FEATURES
from frozen import FROZEN_ARGUMENTS
from fused import FUSED
from gated import GATED_NORMS
from junction import SUMS
from kernels import KERNELS
from keys import KEYS
from linears import LINEARS
from proofs import PROOFS
from rules import RULES
from sequence import ROWS_GATHERED
from vmaps import UNDER_VMAP

from eight_bits import EIGHT_BITS

MUTANTS = [
    *KERNELS,
    *LINEARS,
    *FEW_FEATURES,
    *SUMS,
    *NORMS,
    *GATED_NORMS,
    *ROWS_GATHERED,
    *COMPILED,
    *ENTRIES,
    *RULES,
    *FROZEN_ARGUMENTS,
    *PROOFS,
    *UNDER_VMAP,
    *EIGHT_BITS,
    *EIGHT_BIT_LINEARS,
    *FUSED,
    *KEYS,
]
