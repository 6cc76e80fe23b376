"""Twins: tokens whose keys point the same way (Eq. 1, 2 and 4 of the TwinKV paper).

``sim(i, j)`` is the cosine similarity of two keys; tokens within ``local_window`` positions of each other
are never compared. A key whose norm is zero or not finite has no direction and so no twins;
:func:`invalid_keys` finds them.
"""

from __future__ import annotations

import importlib
import math
import warnings
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from .backends import KeyBatch
from .errors import InputError

__all__ = [
    "BACKENDS",
    "active_backend",
    "best_twin",
    "invalid_keys",
    "isa",
    "isas",
    "set_isa",
    "twin_counts",
    "unavailable",
]

BACKENDS = ("native", "numba", "numpy", "ggml", "cuda")
_AUTO = ("native", "numba", "numpy")  # in order of preference; the others are asked for by name


def twin_counts(
    keys: npt.ArrayLike,
    tau: float,
    local_window: int = 32,
    *,
    positions: npt.ArrayLike | None = None,
    backend: str = "auto",
    n_threads: int | None = None,
) -> npt.NDArray[np.int32]:
    """How many twins each token has: the j with ``|i-j| > local_window`` and ``sim(i, j) > tau`` (Eq. 2).

    Args:
        keys: float32 or float16 ``[..., n, d]``.
        tau: similarity above which two tokens are twins, in (-1, 1]; compared as a float32.
        local_window: positions within which tokens are not compared.
        positions: true positions, int32 ``[n]`` or ``[..., n]``, strictly ascending; None means 0..n-1.
        backend: "auto" or one of ``BACKENDS``; all give the same counts.
        n_threads: None means one per core; no result depends on it.

    Returns:
        int32 ``[..., n]``.

    Raises:
        InputError: shapes, dtypes or numbers are not as above, or the backend cannot run here.
    """
    batch, shape = key_batch(keys, positions)
    checked = check_tau(tau), check_window(local_window), check_threads(n_threads)
    return np.asarray(backend_module(backend).twin_counts(batch, *checked), np.int32).reshape(shape)


def best_twin(
    keys: npt.ArrayLike,
    retained: npt.ArrayLike,
    local_window: int = 32,
    *,
    positions: npt.ArrayLike | None = None,
    backend: str = "auto",
    n_threads: int | None = None,
) -> npt.NDArray[np.float32]:
    """Similarity of each token to its best surviving twin: the largest ``sim(i, j)`` over retained j (Eq. 4).

    Args:
        keys, local_window, positions, backend, n_threads: as for :func:`twin_counts`.
        retained: bool ``[..., n]``, the set a policy keeps.

    Returns:
        float32 ``[..., n]``; -1 where no retained token may be compared with i, and never less.

    Raises:
        InputError: as for :func:`twin_counts`.
    """
    batch, shape = key_batch(keys, positions)
    mask = check_retained(retained, shape).reshape(batch.n_heads, batch.n)
    checked = check_window(local_window), check_threads(n_threads)
    return np.asarray(backend_module(backend).best_twin(batch, mask, *checked), np.float32).reshape(shape)


def invalid_keys(keys: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Which keys have no direction (norm zero or not finite) and so no twins: bool ``[..., n]``."""
    from .backends.numpy import normalize

    batch, shape = key_batch(keys, None)
    valid = np.array([normalize(head)[1] for head in batch.keys], np.bool_)
    return ~valid.reshape(shape)


def unavailable(backend: str) -> str | None:
    """Why a backend cannot run here, or None when it can."""
    if backend not in BACKENDS:
        raise InputError(f"no backend {backend!r}: choose one of {', '.join(('auto', *BACKENDS))}")
    try:
        module = importlib.import_module(f"{__package__}.backends.{backend}")
    except ImportError as error:
        return str(error)
    reason: str | None = module.unavailable()
    return reason


def active_backend(backend: str = "auto") -> str:
    """The name of the backend that runs when ``backend`` is asked for."""
    if backend != "auto":
        reason = unavailable(backend)
        if reason is not None:
            raise InputError(f"backend {backend!r} cannot run here: {reason}")
        return backend
    for name in _AUTO:
        reason = unavailable(name)
        if reason is None:
            return name
        _warn_once(f"twinkv_edge: {reason}; the twin kernels fall back on a slower backend")
    raise InputError("no backend can run here")  # unreachable: numpy always can


def isas() -> dict[str, bool]:
    """Instruction sets the native kernels are built for, best first; whether this processor has them."""
    return dict(_native().isas())


def isa() -> str:
    """The instruction set in use: the best, unless TWINKV_ISA or :func:`set_isa` name another."""
    name: str = _native().isa()
    return name


def set_isa(name: str | None) -> None:
    """Makes the native kernels use one instruction set of :func:`isas`; None goes back to the best.

    Results are the same with each. Raises InputError for a name that is not built in or that this processor does
    not have.
    """
    _native().set_isa(name)


def _native() -> Any:
    reason = unavailable("native")
    if reason is not None:
        raise InputError(reason)
    return importlib.import_module(f"{__package__}._native")


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=4)


def backend_module(backend: str) -> ModuleType:
    """The one dispatch point: every kernel call passes here."""
    return importlib.import_module(f"{__package__}.backends.{active_backend(backend)}")


def key_batch(keys: npt.ArrayLike, positions: npt.ArrayLike | None) -> tuple[KeyBatch, tuple[int, ...]]:
    """Checked keys as ``[B, n, d]``, and the shape ``[..., n]`` of results."""
    array = np.asarray(keys)
    if array.dtype not in (np.float32, np.float16):
        raise InputError(f"keys must be float32 or float16, not {array.dtype}")
    if array.ndim < 2 or array.shape[-1] < 1:
        raise InputError(f"keys must have the shape [..., n, d] with d >= 1, not {list(array.shape)}")
    shape = array.shape[:-1]
    batch = array.reshape(math.prod(shape[:-1]), *array.shape[-2:])
    return KeyBatch(batch, None if positions is None else _check_positions(positions, shape)), shape


def _check_positions(positions: npt.ArrayLike, shape: tuple[int, ...]) -> npt.NDArray[np.int32]:
    array: npt.NDArray[Any] = np.asarray(positions)
    if not np.issubdtype(array.dtype, np.integer):
        raise InputError(f"positions must be integers, not {array.dtype}")
    if array.shape not in (shape, shape[-1:]):
        raise InputError(f"positions must have the shape {list(shape)} or [{shape[-1]}], not {list(array.shape)}")
    if array.size and (array.min() < np.iinfo(np.int32).min or array.max() > np.iinfo(np.int32).max):
        raise InputError("positions must fit int32")
    if np.any(array[..., 1:] <= array[..., :-1]):
        raise InputError("positions must ascend strictly from token to token")
    rows = math.prod(array.shape[:-1])
    return array.astype(np.int32, copy=False).reshape(rows, shape[-1])


def check_retained(retained: npt.ArrayLike, shape: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    array: npt.NDArray[Any] = np.asarray(retained)
    if array.dtype != np.bool_:
        raise InputError(f"retained must be bool, not {array.dtype}")
    if array.shape != shape:
        raise InputError(f"retained must have the shape {list(shape)}, not {list(array.shape)}")
    return array


def check_tau(tau: float) -> float:
    """tau as the float32 value that similarities are compared with."""
    value = float(np.float32(tau)) if isinstance(tau, (int, float, np.floating, np.integer)) else math.nan
    if not -1 < value <= 1:
        raise InputError(f"tau must lie in (-1, 1], not {tau}")
    return value


def check_window(local_window: int, name: str = "local_window") -> int:
    if not isinstance(local_window, (int, np.integer)) or isinstance(local_window, bool) or local_window < 0:
        raise InputError(f"{name} must be a whole number >= 0, not {local_window}")
    return min(int(local_window), 2**32)  # wider than any two positions are apart


def check_threads(n_threads: int | None) -> int | None:
    if n_threads is not None and (not isinstance(n_threads, (int, np.integer)) or n_threads < 1):
        raise InputError(f"n_threads must be None or a whole number >= 1, not {n_threads}")
    return None if n_threads is None else int(n_threads)
