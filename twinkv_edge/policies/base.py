"""The base of every eviction policy, and what a policy gets to see."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Needs:
    """What must be captured during prefill for a policy. Keys, values and positions are always there."""

    query_window: int = 0
    query_statistics: bool = False


@dataclass
class LayerView:
    """One layer of the cache as a policy sees it. Everything is read when first asked for.

    Attributes:
        index: Number of the layer among the evictable ones, from 0; `n_layers` of them.
        positions: True token positions, int32 [H, n], ascending per head.
        n_tokens: Tokens of the conversation so far; the next one stands at this position.
        group: Query heads per KV head (GQA group).
        kq_scale: What attention multiplies query-key products by.
    """

    index: int
    n_layers: int
    positions: IntArray
    n_tokens: int
    group: int
    kq_scale: float
    read_keys: Callable[[], FloatArray] = field(repr=False)
    read_values: Callable[[], FloatArray] = field(repr=False)
    transform_keys: Callable[[FloatArray], FloatArray] = field(repr=False, default=lambda keys: keys)

    @cached_property
    def keys(self) -> FloatArray:
        """float32 [H, n, d], after RoPE."""
        return self.read_keys()

    @cached_property
    def values(self) -> FloatArray:
        """float32 [H, n, d_v]."""
        return self.read_values()

    @cached_property
    def compared_keys(self) -> FloatArray:
        """The keys in the key space in which twins are looked for, float32 [H, n, d or d/2]."""
        return self.transform_keys(self.keys)


class Policy(ABC):
    """Scores tokens; higher means keep.

    A policy only scores. Sinks and recent tokens, the budget, ties (the lower position wins) and the repair are not its
    business. Options are keyword arguments of __init__.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line for `twinkv-edge policies`."""
    needs: Needs = Needs()

    @abstractmethod
    def score(self, layer: LayerView) -> FloatArray:
        """Scores of one layer, float32 [H, n]: higher means keep."""
