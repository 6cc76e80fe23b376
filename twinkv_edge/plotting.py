"""The one door to matplotlib, which only pictures need."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
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


def save(figure: Any, path: str | Path) -> None:
    """Writes a figure as a PNG and closes it.

    Raises:
        InputError: The file cannot be written.
    """
    try:
        figure.savefig(path, dpi=150, bbox_inches="tight", format="png")
    except OSError as e:
        raise InputError(f"cannot write {path}: {(e.strerror or str(e)).lower()}") from e
    finally:
        pyplot().close(figure)


def grouped_bars(
    panel: Any,
    series: Mapping[str, Mapping[str, float]],
    spread: Mapping[str, Mapping[str, tuple[float, float]]] | None = None,
) -> None:
    """Bars side by side over each name, one colour per series.

    Args:
        panel: Axes of matplotlib.
        series: Per label, the values by name; a name may be missing in some.
        spread: The same of how far each value may be off, below and above.
    """
    names = list(dict.fromkeys(name for values in series.values() for name in values))
    width = 0.8 / len(series)
    for k, (label, values) in enumerate(series.items()):
        at = [i + (k - (len(series) - 1) / 2) * width for i, name in enumerate(names) if name in values]
        here = [name for name in names if name in values]
        off = None if spread is None else list(zip(*(spread[label][name] for name in here), strict=True))
        panel.bar(at, [values[name] for name in here], width, yerr=off, error_kw={"linewidth": 0.6}, label=label)
    panel.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=7)
