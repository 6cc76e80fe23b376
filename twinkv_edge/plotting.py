"""The one door to matplotlib, which only pictures need."""

from __future__ import annotations

from typing import Any

from .errors import InputError


def pyplot() -> Any:
    """matplotlib.pyplot, drawing into files.

    Raises:
        InputError: matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as e:
        raise InputError("plots need matplotlib: pip install 'twinkv-edge[bench]'") from e
    return plt
