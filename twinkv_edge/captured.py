"""What was captured of a layer's queries while tokens were evaluated, checked before anyone scores with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import CacheStateError, InputError
from .policies.base import FloatArray, Needs, Statistics, Window

if TYPE_CHECKING:
    from .layers import Layer

SKIPPED = 4  # first tokens left out of the statistics: sinks, whose queries are like no others (KVPress does the same)
HELD = 64  # queries held at least, so that statistics and sums survive a few tokens being taken back

_REMEDY = (
    "evaluate the prompt again with the policy set: CompressedLlama(compression=Compression(policy=...)), or "
    "llm.capture_for(policy) and llm.reset()"
)


def configure(tap: Any, needs: Needs, n_threads: int) -> None:
    """Captures what is needed from the next token on. What was captured is kept if the needs are the same."""
    window = needs.query_window
    if needs.query_statistics or needs.attention:
        window = max(window, HELD)
    tap.capture(window, needs.query_statistics, needs.attention, SKIPPED, n_threads)


def last_queries(tap: Any, layer: Layer, n_tokens: int, window: int) -> tuple[Window, str]:
    """The queries of the last `window` tokens, or of as many as there are, and a note for the user if they are fewer.

    Raises:
        CacheStateError: None of them was captured.
    """
    held = tap.window_size(layer.tap_index)
    queries = np.empty((held, layer.n_head, layer.head_dim_k), dtype=np.float32)
    positions = np.empty(held, dtype=np.int32)
    if held:
        tap.window(layer.tap_index, queries, positions)
    # those that run without a gap up to the last token
    expected = np.arange(n_tokens - held, n_tokens, dtype=np.int32)
    gaps = np.flatnonzero(positions != expected)
    usable = held - (int(gaps[-1]) + 1 if gaps.size else 0)
    if usable == 0:
        raise CacheStateError(
            f"the policy scores with the queries of the last tokens, which were not captured: {_REMEDY}"
        )
    note = ""
    if usable < min(window, n_tokens):
        note = (
            f"only the last {usable} queries were captured of a window of {window}: the tokens before them were "
            "evaluated when nothing was captured, or taken back since"
        )
    size = min(usable, window)
    return Window(queries[held - size :], positions[held - size :]), note


def query_statistics(tap: Any, layer: Layer, n_tokens: int) -> Statistics:
    """Mean and covariance of the queries of all tokens from the fifth on.

    Raises:
        CacheStateError: Some of them were not captured.
        InputError: There are no such tokens.
    """
    if n_tokens <= SKIPPED:
        raise InputError(
            f"the policy needs a prompt of more than {SKIPPED} tokens: the queries of the first are left out"
        )
    counted = tap.statistics_count(layer.tap_index)
    if counted != n_tokens - SKIPPED:
        raise CacheStateError(
            f"the policy scores with the queries of all {n_tokens - SKIPPED} tokens from the fifth on, and {counted} "
            f"were captured: {_REMEDY}"
        )
    mean = np.empty((layer.n_head, layer.head_dim_k))
    covariance = np.empty((layer.n_head, layer.head_dim_k, layer.head_dim_k))
    tap.statistics(layer.tap_index, mean, covariance)
    return Statistics(mean, covariance)


def attention(tap: Any, layer: Layer, n_tokens: int, n_cells: int) -> FloatArray:
    """Attention that each cell received from all queries, summed over them and the group: float32 [H, n_cells].

    Raises:
        CacheStateError: Some of the queries were not captured.
    """
    counted = tap.attention_count(layer.tap_index)
    if counted != n_tokens:
        raise CacheStateError(
            f"the policy scores with the attention of all {n_tokens} tokens, and that of {counted} was captured: "
            f"{_REMEDY}"
        )
    sums = np.empty((layer.n_head_kv, n_cells), dtype=np.float32)
    tap.attention(layer.tap_index, sums)
    return sums
