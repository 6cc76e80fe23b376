"""What became of each token in each head: one small number, from the sets before and after the repair."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]


class Role(IntEnum):
    """The page's script uses the same numbers."""

    COVERED = 0  # evicted, and a twin of it was kept
    KEPT = 1
    DONOR = 2  # kept although a twin of it is kept too
    ORPHAN = 3  # evicted, and nothing like it was kept
    SWAPPED_OUT = 4  # a donor that the repair evicted
    SWAPPED_IN = 5  # an orphan that the repair brought back


IN_CACHE = (Role.KEPT, Role.DONOR, Role.SWAPPED_IN)


def roles(
    chosen: BoolArray,
    repaired: BoolArray,
    best: npt.NDArray[np.float32],
    tau: float,
    protected: BoolArray,
) -> npt.NDArray[np.uint8]:
    """Roles of tokens, uint8 [..., n].

    Args:
        chosen: What the policy keeps, bool [..., n].
        repaired: The same after the repair.
        best: Similarity of each token to its best twin among `chosen` (`twin_counts`' sister `best_twin`), [..., n].
        tau: From which similarity on a token counts as covered.
        protected: Sinks and recent tokens, bool [..., n]: they are never donors.
    """
    covered = best >= np.float32(tau)
    out = np.full(chosen.shape, Role.COVERED, dtype=np.uint8)
    out[~chosen & ~repaired & ~covered] = Role.ORPHAN
    out[chosen & repaired] = Role.KEPT
    out[chosen & repaired & covered & ~protected] = Role.DONOR
    out[chosen & ~repaired] = Role.SWAPPED_OUT
    out[~chosen & repaired] = Role.SWAPPED_IN
    return out


def count(roles: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """How many tokens have each role: uint8 [L, H, n] -> int64 [L, 6], summed over the heads of a layer."""
    return np.array([np.bincount(layer.ravel(), minlength=len(Role)) for layer in roles])
