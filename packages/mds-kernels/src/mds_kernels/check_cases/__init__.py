"""The cases on which every op is compared with float64, by ``mds-kernels verify`` and the tests.

Odd sizes, strided inputs, no rows, all labels ignored, logits of 1e4: where kernels go wrong.
"""

from mds_kernels.check import Check
from mds_kernels.check_cases import norm, pointwise, routed, vocabulary

__all__ = ["CASES"]

CASES: tuple[Check, ...] = (*vocabulary.CASES, *norm.CASES, *pointwise.CASES, *routed.CASES)
"""Every case of every op."""
