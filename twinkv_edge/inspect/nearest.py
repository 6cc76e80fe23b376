"""The twins of every token: the best few of each, found block by block, never as an n x n matrix."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..backends.numpy import normalize

_ROWS = 128  # rows at once: 128 x 10,000 similarities are 5 MB, about a second-level cache


@dataclass(frozen=True)
class TwinLists:
    """The best twins of each token that has any, one after another.

    Token i of head h has `lengths[h, i]` entries, the most similar first; those of (0, 0) come first, then (0, 1), ...

    Attributes:
        lengths: uint8 [H, n].
        tokens: Which token the twin is, int32 [sum of lengths].
        similarities: float32 [sum of lengths].
    """

    lengths: npt.NDArray[np.uint8]
    tokens: npt.NDArray[np.int32]
    similarities: npt.NDArray[np.float32]


def nearest(
    keys: npt.NDArray[np.float32],
    counts: npt.NDArray[np.int32],
    positions: npt.NDArray[np.int32],
    local_window: int,
    most: int,
) -> TwinLists:
    """The `most` best twins of each token.

    Similarities are sums in float32, so the last digits differ from the kernels'; how many twins there are is taken
    from their exact counts.

    Args:
        keys: float32 [H, n, d].
        counts: How many twins each token has, int32 [H, n]: tokens with none are skipped.
        positions: True positions, int32 [H, n].
        local_window: Positions within which tokens are not compared.
        most: Entries per token, at most 255.
    """
    lengths = np.minimum(counts, most).astype(np.uint8)
    tokens, similarities = [], []
    for head in range(len(keys)):
        unit = normalize(keys[head])[0]
        rows = np.flatnonzero(lengths[head])
        for start in range(0, rows.size, _ROWS):
            block = rows[start : start + _ROWS]
            found = _best(unit, positions[head], block, local_window, most)
            wanted = np.arange(most) < lengths[head, block, None]
            tokens.append(found[0][wanted])
            similarities.append(found[1][wanted])
    return TwinLists(
        lengths,
        np.concatenate([np.empty(0, np.int32), *tokens]).astype(np.int32),
        np.concatenate([np.empty(0, np.float32), *similarities]).astype(np.float32),
    )


def _best(
    unit: npt.NDArray[np.float32],
    positions: npt.NDArray[np.int32],
    block: npt.NDArray[np.intp],
    local_window: int,
    most: int,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Tokens and similarities, [rows, most], best first."""
    similarity = unit[block] @ unit.T
    # positions ascend, so those too near to compare are one run
    first = np.searchsorted(positions, positions[block] - local_window, side="left")
    last = np.searchsorted(positions, positions[block] + local_window, side="right")
    for row, (a, b) in enumerate(zip(first, last, strict=True)):
        similarity[row, a:b] = -2
    tokens = np.empty((len(block), most), dtype=np.int32)
    values = np.empty((len(block), most), dtype=np.float32)
    every = np.arange(len(block))
    for rank in range(most):
        tokens[:, rank] = similarity.argmax(axis=1)
        values[:, rank] = similarity[every, tokens[:, rank]]
        similarity[every, tokens[:, rank]] = -2
    return tokens, values
