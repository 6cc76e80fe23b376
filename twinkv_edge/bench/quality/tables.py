"""From lines of results to tables: means over tasks, paired differences, and which of them are more than noise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .results import Line
from .settings import ALONE, Config, Settings

RESAMPLES = 2000
CONFIDENCE = 0.95
FEWEST = 5  # samples below which a cell is never called a win or a loss: too few to tell
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A mean with the ends of its bootstrap interval."""

    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> int:
        """1 above zero beyond the interval, -1 below, 0 neither."""
        return int(self.low > 0) - int(self.high < 0)


def resamples(n: int, seed: int) -> npt.NDArray[np.intp]:
    """Which samples are drawn, int [RESAMPLES, n]; the same for all configurations of a task, so they stay paired."""
    return np.random.default_rng([seed, n]).integers(0, n, (RESAMPLES, n))


def estimate(values: Sequence[FloatArray]) -> Estimate:
    """The mean over tasks of the mean over samples, its interval by drawing samples anew within every task.

    Args:
        values: Per task, float64 [samples].
    """
    mean = float(np.mean([v.mean() for v in values]))
    drawn = np.mean([v[resamples(v.size, seed)].mean(axis=1) for seed, v in enumerate(values)], axis=0)
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(drawn, [tail, 100 - tail])
    return Estimate(mean, float(low), float(high))


def tables(settings: Settings, lines: Iterable[Line], min_full: float = 0.0) -> dict[str, Any]:
    """Everything that the run says, ready for JSON.

    Args:
        settings: Of the run.
        lines: Its lines; their order does not matter.
        min_full: Tasks whose full cache scores below it count for nothing in the means and cells.

    Returns:
        "tasks": per task its samples, full-cache mean and whether it counts; "rows": one per policy, ratio, layout, tau
        and repair, of tasks with a score from 0 to 1; "continuation": the same of likelihoods, in nats, where less is
        better; "cells": every task of every row. In rows and cells "delta" is repaired minus alone; "wins" and
        "losses" count the cells of a row that are beyond their intervals.
    """
    ordered = sorted(lines, key=lambda line: (line["task"], line["index"]))
    by_task: dict[str, list[Line]] = {}
    for line in ordered:
        by_task.setdefault(line["task"], []).append(line)
    scored = {t: found for t, found in by_task.items() if "score" in found[0]["outcomes"][0]}
    likely = {t: found for t, found in by_task.items() if t not in scored}
    full = {t: float(np.mean(_column(found, 0, "score"))) for t, found in scored.items()}
    counted = {t: found for t, found in scored.items() if full[t] >= min_full}
    rows, cells = _compare(settings, counted, "score", better=1)
    likelihood_rows, likelihood_cells = _compare(settings, likely, "nll", better=-1)
    return {
        "settings": settings.to_dict(),
        "min_full": min_full,
        "tasks": {
            **{t: {"samples": len(v), "full": full[t], "counted": t in counted} for t, v in scored.items()},
            **{t: {"samples": len(v), "full_nll": float(np.mean(_column(v, 0, "nll")))} for t, v in likely.items()},
        },
        "full": float(np.mean([full[t] for t in counted])) if counted else None,
        "rows": rows,
        "continuation": likelihood_rows,
        "cells": cells + likelihood_cells,
    }


def _column(found: list[Line], config: int, name: str) -> FloatArray:
    return np.array([line["outcomes"][config][name] for line in found], dtype=np.float64)


def _alone(settings: Settings, config: Config) -> int:
    return settings.configs.index(Config(config.policy, config.ratio, ALONE, config.layout))


def _compare(
    settings: Settings, found: dict[str, list[Line]], name: str, *, better: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows and cells of one kind of outcome; `better` is 1 where more is better, else -1."""
    rows: list[dict[str, Any]] = []
    cells: list[dict[str, Any]] = []
    for number, config in enumerate(settings.configs):
        if number == 0 or not found:
            continue
        reference = _alone(settings, config)
        values = [_column(lines, number, name) for lines in found.values()]
        deltas = [v - _column(lines, reference, name) for v, lines in zip(values, found.values(), strict=True)]
        row = {**asdict(config), "value": asdict(estimate(values))}
        if name == "nll":
            lost = [v - _column(lines, 0, name) for v, lines in zip(values, found.values(), strict=True)]
            row |= {
                "over_full": float(np.mean([x.mean() for x in lost])),
                "kl": float(np.mean([_column(lines, number, "kl").mean() for lines in found.values()])),
                "worst_delta": float(max(d.mean() for d in deltas)),
            }
        if number != reference:
            here = [
                {**asdict(config), "task": task, "samples": d.size, "delta": asdict(estimate([d]))}
                for task, d in zip(found, deltas, strict=True)
            ]
            for cell in here:
                verdict = Estimate(**cell["delta"]).verdict * better
                cell["verdict"] = verdict if cell["samples"] >= FEWEST else 0
            cells += here
            row |= {
                "delta": asdict(estimate(deltas)),
                "cells": len(here),
                "wins": sum(cell["verdict"] > 0 for cell in here),
                "losses": sum(cell["verdict"] < 0 for cell in here),
            }
        rows.append(row)
    return rows, cells
