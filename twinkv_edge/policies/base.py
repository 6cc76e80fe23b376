"""The base of every eviction policy, and what a policy gets to see."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from ..errors import CacheStateError
from ..key_space import NO_ROTATION, Rotation

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]


class Window(NamedTuple):
    queries: FloatArray
    positions: IntArray


class Statistics(NamedTuple):
    mean: npt.NDArray[np.float64]
    covariance: npt.NDArray[np.float64]


@dataclass(frozen=True)
class Needs:
    """What must be captured while the prompt is evaluated. Keys, values and positions are always there.

    Attributes:
        query_window: Queries of so many of the last tokens.
        query_statistics: Mean and covariance of the queries of all tokens but the first few.
        attention: What each key received of the attention of every query.
    """

    query_window: int = 0
    query_statistics: bool = False
    attention: bool = False

    def __or__(self, other: Needs) -> Needs:
        """What both need."""
        return Needs(
            max(self.query_window, other.query_window),
            self.query_statistics or other.query_statistics,
            self.attention or other.attention,
        )


def _not_captured(*_: object) -> NoReturn:
    raise CacheStateError("this view of the cache carries no queries")


@dataclass
class LayerView:
    """One layer of the cache as a policy sees it. Everything is read when first asked for.

    H is the number of KV heads in the view, n_head of query heads: query head i reads KV head i // group. A view shows
    all heads of a layer or, where they hold different numbers of tokens, one of them.

    Attributes:
        index: Number of the layer among the evictable ones, from 0; `n_layers` of them.
        positions: True token positions, int32 [H, n], ascending per head.
        n_tokens: Tokens of the conversation so far; the next one stands at this position.
        group: Query heads per KV head (GQA group).
        kq_scale: What attention multiplies query-key products by.
        softcap: Attention caps its logits as softcap * tanh(logit / softcap); 0: it does not.
        rotation: How keys and queries were rotated.
        heads: Which KV heads of the layer these are.
        has_qk_norm: Whether the model normalizes queries and keys (QK-norm).
        n_threads: What the model was given for prompts, and native work on the layer may take; None: one per core.
        notes: What the user should know of how the scores came about; see `note`.
    """

    index: int
    n_layers: int
    positions: IntArray
    n_tokens: int
    group: int
    kq_scale: float
    read_keys: Callable[[], FloatArray] = field(repr=False)
    read_values: Callable[[], FloatArray] = field(repr=False)
    transform_keys: Callable[..., FloatArray] = field(repr=False, default=lambda keys, space="rope": keys)
    read_window: Callable[[int], Window] = field(repr=False, default=_not_captured)
    read_statistics: Callable[[], Statistics] = field(repr=False, default=_not_captured)
    read_attention: Callable[[], FloatArray] = field(repr=False, default=_not_captured)
    softcap: float = 0.0
    rotation: Rotation = NO_ROTATION
    heads: slice = field(default_factory=lambda: slice(None))
    has_qk_norm: bool = False
    n_threads: int | None = None
    notes: list[str] = field(default_factory=list)

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

    @cached_property
    def unrotated_keys(self) -> FloatArray:
        """The keys with RoPE taken back, whatever space twins are looked for in, float32 [H, n, d]."""
        return self.transform_keys(self.keys, "unrotated")

    def last_queries(self, window: int) -> Window:
        """Queries of the last `window` tokens, as attention used them (after RoPE): queries float32 [w, n_head, d] and
        their tokens' positions int32 [w], ascending up to n_tokens - 1.

        w is smaller than `window` where the conversation is shorter or earlier queries were not seen; the user is told.
        The policy must ask for them: `needs = Needs(query_window=...)`.

        Raises:
            CacheStateError: No query of the last token was captured.
        """
        return self.read_window(window)

    @cached_property
    def query_statistics(self) -> Statistics:
        """Mean float64 [n_head, d] and covariance float64 [n_head, d, d] of the queries before RoPE, over all tokens
        but the first 4. The policy must ask for them: `needs = Needs(query_statistics=True)`.

        Raises:
            CacheStateError: Not every token's query was captured.
        """
        return self.read_statistics()

    @cached_property
    def attention(self) -> FloatArray:
        """Attention each key received, summed over all queries since its own and over the group: float32 [H, n].

        The policy must ask for it: `needs = Needs(attention=True)`.

        Raises:
            CacheStateError: Not every token's query was captured.
        """
        return self.read_attention()

    def note(self, text: str) -> None:
        """Tells the user something about these scores: a warning, and a line of the report."""
        if text not in self.notes:
            self.notes.append(text)


class Policy(ABC):
    """Scores tokens; higher means keep.

    A policy only scores, and may share out the budget unevenly. Sinks and recent tokens, the budget as a whole, ties
    (the lower position wins) and the repair are not its business. Options are keyword arguments of __init__; those
    named as a setting of `Compression` (n_sink, n_recent, local_window, tau) take its value unless given, and `base` is
    another policy, made by its name.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line for `twinkv-edge policies`."""
    needs: Needs = Needs()
    ragged: bool = False
    """Whether `budgets` gives heads or layers different numbers of tokens."""

    @abstractmethod
    def score(self, layer: LayerView) -> FloatArray:
        """Scores of one layer, float32 [H, n]: higher means keep."""

    def bind(self, model: str | os.PathLike[str]) -> None:  # noqa: B027
        """Told which model file it will score, before a prompt is evaluated: what it needs of its own is loaded here.

        Raises:
            InputError: Something is missing.
        """

    def budgets(self, layer: LayerView, scores: FloatArray, keep: int, always: BoolArray) -> IntArray:
        """Tokens that each head of the layer keeps, int [H]. Only asked of a policy that is `ragged`.

        Args:
            layer: The layer, of a cache whose heads all hold n tokens.
            scores: What `score` gave, float32 [H, n].
            keep: Tokens that every head would keep. Over all layers and heads the budgets must not add up to more.
            always: Protected tokens, bool [H, n]: no head can keep fewer than those.
        """
        return np.full(len(scores), keep, dtype=np.int32)
