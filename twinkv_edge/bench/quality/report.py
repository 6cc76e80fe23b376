"""The tables as Markdown, and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...plotting import grouped_bars, pyplot, save
from .settings import ALONE
from .tables import CONFIDENCE, FEWEST

WHERE = {
    "window": "the question stands in the recent window and is seen by the policies (as in the TwinKV paper)",
    "after": "the question comes after the eviction and is seen by no policy (as in KVPress)",
}


def markdown(result: dict[str, Any]) -> str:
    """All tables of a run."""
    s = result["settings"]
    parts = [
        f"{s['model'].split(' (')[0]}, {s['length']} tokens, seed {s['seed']}: {WHERE[s['question']]}. "
        f"{s['type_k']}/{s['type_v']} cache, {s['threads']} threads."
    ]
    if result["rows"]:
        parts += [_scores(result)]
    if result["continuation"]:
        parts += [_likelihoods(result)]
    parts += [_tasks(result)]
    return "\n\n".join(parts)


def _groups(rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Every policy alone, with its repaired rows."""
    groups = []
    for row in rows:
        if row["repair"] == ALONE:
            alike = [
                r for r in rows if r["repair"] != ALONE and all(r[k] == row[k] for k in ("policy", "ratio", "layout"))
            ]
            groups.append((row, alike))
    return groups


def _name(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    several = len({r["layout"] for r in rows}) > 1
    return str(row["policy"]) + (f", {row['layout']} layout" if several else "")


def _repair(row: dict[str, Any]) -> str:
    return str(row["repair"]) + (f", tau {row['tau']}" if row["tau"] is not None else "")


def _scores(result: dict[str, Any]) -> str:
    rows = result["rows"]
    counted = [t for t, found in result["tasks"].items() if found.get("counted")]
    head = f"Mean score of {len(counted)} tasks; full cache {result['full']:.3f}. "
    if result["min_full"] > 0:
        head += f"Only tasks that the full cache does with at least {result['min_full']:g} count. "
    head += (
        f"In brackets the {100 * CONFIDENCE:.0f} % bootstrap interval of the difference, paired over samples; a cell "
        f"(task, policy, ratio) is won or lost beyond its own interval, of at least {FEWEST} samples."
    )
    lines = [head, "", "| policy | ratio | Alone | repair | +Rep | delta | won | lost | cells |"]
    lines.append("|---|---:|---:|---|---:|---|---:|---:|---:|")
    for alone, repaired in _groups(rows):
        start = f"| {_name(alone, rows)} | {alone['ratio']} | {alone['value']['mean']:.3f} |"
        if not repaired:
            lines.append(f"{start} | | | | | |")
        for r in repaired:
            d = r["delta"]
            lines.append(
                f"{start} {_repair(r)} | {r['value']['mean']:.3f} "
                f"| {_difference(d, 3)} | {r['wins']} | {r['losses']} | {r['cells']} |"
            )
    return "\n".join([*lines, *_sums(rows)])


def _difference(d: dict[str, float], digits: int) -> str:
    """A mean and its interval; the mean alone where every task has one sample, which says nothing of the spread."""
    mean = f"{d['mean']:+.{digits}f}"
    return mean if d["low"] == d["high"] else f"{mean} [{d['low']:+.{digits}f}, {d['high']:+.{digits}f}]"


def _likelihoods(result: dict[str, Any]) -> str:
    rows = result["continuation"]
    lines = [
        f"Continuation, {result['settings']['continuation']} tokens: negative log-likelihood in nats per token above "
        "the full cache's, less is better; KL is the divergence of the prediction from the full cache's.",
        "",
        "| policy | ratio | Alone | KL | repair | +Rep | KL | delta | worst text | won | lost | cells |",
        "|---|---:|---:|---:|---|---:|---:|---|---:|---:|---:|---:|",
    ]
    for alone, repaired in _groups(rows):
        start = f"| {_name(alone, rows)} | {alone['ratio']} | {alone['over_full']:+.4f} | {alone['kl']:.4f} |"
        if not repaired:
            lines.append(f"{start} | | | | | | | |")
        for r in repaired:
            d = r["delta"]
            lines.append(
                f"{start} {_repair(r)} | {r['over_full']:+.4f} | {r['kl']:.4f} | {_difference(d, 4)} "
                f"| {r['worst_delta']:+.4f} | {r['wins']} | {r['losses']} | {r['cells']} |"
            )
    return "\n".join([*lines, *_sums(rows)])


def _sums(rows: list[dict[str, Any]]) -> list[str]:
    """Win rates of every repair over all its cells."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["repair"] != ALONE:
            found.setdefault(_repair(row), []).append(row)
    lines = [""] if found else []
    for name, alike in found.items():
        cells, wins, losses = (sum(r[k] for r in alike) for k in ("cells", "wins", "losses"))
        mean = sum(r["delta"]["mean"] for r in alike) / len(alike)
        lines.append(
            f"{name}: mean delta {mean:+.4f}; {wins} of {cells} cells won ({100 * wins / cells:.0f} %), {losses} lost "
            f"({100 * losses / cells:.0f} %)."
        )
    return lines


def _tasks(result: dict[str, Any]) -> str:
    lines = ["| task | samples | full cache |", "|---|---:|---:|"]
    for name, found in result["tasks"].items():
        full = f"{found['full']:.3f}" if "full" in found else f"{found['full_nll']:.3f} nats"
        mark = "" if found.get("counted", True) else " (not counted)"
        lines.append(f"| {name}{mark} | {found['samples']} | {full} |")
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """Bars of every policy, alone and repaired, one panel per ratio; the dashed line is the full cache.

    Raises:
        InputError: matplotlib is not installed, or the file cannot be written.
    """
    from ...errors import InputError

    plt = pyplot()
    likelihoods = not result["rows"]
    rows = result["continuation"] if likelihoods else result["rows"]
    if not rows:
        raise InputError("there are no results to draw")
    ratios = sorted({r["ratio"] for r in rows})
    figure, panels = plt.subplots(1, len(ratios), figsize=(4.6 * len(ratios), 3.4), sharey=True, squeeze=False)
    for panel, ratio in zip(panels[0], ratios, strict=True):
        _bars(panel, [r for r in rows if r["ratio"] == ratio], likelihoods)
        panel.set_title(f"{100 * ratio:g} % evicted")
        if result["full"] is not None and not likelihoods:
            panel.axhline(result["full"], linestyle="--", color="0.4", linewidth=1, label="full cache")
    panels[0][0].set_ylabel("nats per token above the full cache" if likelihoods else "mean score")
    panels[0][-1].legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    save(figure, path)


def _bars(panel: Any, rows: list[dict[str, Any]], likelihoods: bool) -> None:
    values: dict[str, dict[str, float]] = {}
    spread: dict[str, dict[str, tuple[float, float]]] = {}
    for r in rows:
        kind, name = _repair(r), _name(r, rows)
        label = "alone" if kind == ALONE else f"+ {kind}"
        if likelihoods:
            values.setdefault(label, {})[name] = r["over_full"]
            continue
        found = r["value"]
        values.setdefault(label, {})[name] = found["mean"]
        spread.setdefault(label, {})[name] = (found["mean"] - found["low"], found["high"] - found["mean"])
    grouped_bars(panel, values, spread or None)
