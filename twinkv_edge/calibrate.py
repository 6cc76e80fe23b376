"""Q-Filters of a model: the main direction of every head's queries, from a text of the user's own."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from . import key_space
from .atomic import replacing
from .errors import InputError
from .models.embedded import cache_dir
from .models.fingerprint import fingerprint

if TYPE_CHECKING:
    from .llama import CompressedLlama

FORMAT = 1
MIN_TOKENS = 256
CHUNK = 512  # tokens whose queries are held at once
CONTEXT = 2048  # the text is read in stretches of so many tokens, each from an empty cache

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Filters:
    """Directions float32 [L, H, d], of length 1, in the space of keys after RoPE (before any Hadamard product)."""

    directions: npt.NDArray[np.float32]
    fingerprint: str
    n_tokens: int


def calibrate(
    llm: CompressedLlama,
    text: str | Sequence[int],
    path: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Evaluates a text and keeps, per KV head, the main direction of the queries that read it (Q-Filters, Godey et al.,
    2025): the first right singular vector of each query head's queries after RoPE, turned towards their mean; the mean
    over the group.

    Args:
        llm: Its conversation is lost: the cache is empty afterwards.
        text: Text like what will be compressed, or its tokens; at least 256 of them, a few thousand are better.
        path: Where to keep the filters; None: where policy "qfilters" looks for those of this model.
        progress: Called with (tokens done, tokens).

    Returns:
        The file: some 100 KB.

    Raises:
        InputError: The text is too short, or the file cannot be written.
    """
    tokens = llm.tokenize(text.encode(), add_bos=False) if isinstance(text, str) else list(text)
    if reason := shortfall(len(tokens)):
        raise InputError(reason)
    moments, means = _moments(llm, tokens, progress)
    directions = main_directions(moments, means)
    group = llm.kv.layers[0].n_head // llm.kv.n_head_kv
    grouped = directions.reshape(llm.kv.n_layers, llm.kv.n_head_kv, group, -1).mean(axis=2)
    grouped /= np.maximum(np.linalg.norm(grouped, axis=-1, keepdims=True), 1e-12)
    mark = fingerprint(llm.facts.path)
    out = default_path(mark) if path is None else Path(path)
    _write(out, Filters(grouped.astype(np.float32), mark, len(tokens)))
    return out


def shortfall(n_tokens: int) -> str:
    """Why a text of so many tokens cannot be used, or nothing."""
    if n_tokens >= MIN_TOKENS:
        return ""
    return f"{n_tokens} tokens are too few to find main directions: give at least {MIN_TOKENS}"


def _moments(
    llm: CompressedLlama, tokens: list[int], progress: Progress | None
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Sums over all queries q of q q^T, [L, n_head, d, d], and of q, [L, n_head, d]."""
    from .captured import last_queries
    from .policies.base import Needs

    layers = llm.kv.layers
    shape = (len(layers), layers[0].n_head, layers[0].head_dim_k)
    moments, means = np.zeros((*shape, shape[-1])), np.zeros(shape)
    context = min(CONTEXT, llm.kv.n_cells_allocated)
    llm.reset()
    llm.capture_for(Needs(query_window=CHUNK))
    try:
        for start in range(0, len(tokens), CHUNK):
            chunk = tokens[start : start + CHUNK]
            if llm.n_tokens + len(chunk) > context:
                llm.reset()
            llm.eval(chunk)
            for i, layer in enumerate(layers):
                window, _ = last_queries(llm._tap, layer, llm.n_tokens, len(chunk))
                q = window.queries.transpose(1, 0, 2)
                moments[i] += q.transpose(0, 2, 1) @ q
                means[i] += q.sum(axis=1)
            if progress:
                progress(min(start + CHUNK, len(tokens)), len(tokens))
    finally:
        llm.reset()
        llm.capture_for()
    if size := layers[0].rotation.hadamard:
        h = key_space.hadamard(size, shape[-1])
        return h @ moments @ h, means @ h
    return moments, means


def main_directions(moments: npt.NDArray[np.float64], means: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The first right singular vectors of queries with these sums, [..., d], on the side of their mean."""
    _, vectors = np.linalg.eigh(moments)
    main = vectors[..., -1]
    turned = np.where((main * means).sum(axis=-1, keepdims=True) < 0, -main, main)
    return np.asarray(turned)


def default_path(mark: str) -> Path:
    """Where the filters of a model with this fingerprint are kept."""
    return cache_dir() / "qfilters" / f"{mark}.npz"


def load(path: str | os.PathLike[str], mark: str) -> Filters:
    """Filters of the model with this fingerprint.

    Raises:
        InputError: There is no such file, it is no filter file, or it is another model's.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            version, found = int(file["format"]), Filters(file["directions"], str(file["model"]), int(file["n_tokens"]))
    except FileNotFoundError as why:
        raise InputError(
            f"there are no Q-Filters of this model at {path}: make them from a text of yours with `twinkv-edge "
            "calibrate`, or twinkv_edge.calibrate.calibrate(llm, text)"
        ) from why
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as why:
        raise InputError(f"{path} is no file of Q-Filters: {why}") from why
    if version != FORMAT:
        raise InputError(f"{path} has format {version}, and this version reads {FORMAT}: calibrate again")
    if found.fingerprint != mark:
        raise InputError(f"the Q-Filters in {path} are another model's: calibrate this one")
    return found


def _write(path: Path, filters: Filters) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            np.savez_compressed(
                file,
                format=FORMAT,
                model=filters.fingerprint,
                n_tokens=filters.n_tokens,
                directions=filters.directions,
            )
    except OSError as why:
        raise InputError(f"{path} cannot be written: {why.strerror}") from why
