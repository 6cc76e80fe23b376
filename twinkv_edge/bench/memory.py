"""What the cache costs over the life of a session: llama.cpp as it is, and ours, one process per configuration."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import models
from ..errors import InputError, TwinKVError
from ..plotting import pyplot, save
from . import memory_peer
from .memory_child import LIFE_AFTER

MIB = 1 << 20


@dataclass(frozen=True)
class Configuration:
    """A way to run a session.

    Attributes:
        name: What tables and plots call it.
        kind: "llama.cpp" (llama_cpp.Llama as it is), "twinkv_edge" or "kvpress".
        cache_type: Type of K and V rows by ggml's name.
        compression: Fields of `Compression`, for kind "twinkv_edge"; the ratio alone, for "kvpress".
    """

    name: str
    kind: str
    cache_type: str
    compression: dict[str, Any] = field(default_factory=dict)


def configurations(
    n_tokens: int,
    policy: str = "knorm",
    ratios: Sequence[float] = (0.5, 0.7),
    types: Sequence[str] = ("f16", "q8_0", "q4_0"),
) -> list[Configuration]:
    """Caches of every type: as they are, evicted from by every ratio after prefill, and during it."""
    target = max(1024, n_tokens // 8)
    bounded = {"policy": policy, "target_tokens": target, "prefill": "bounded"}
    return [
        *(Configuration(f"llama.cpp {t}", "llama.cpp", t) for t in types),
        *(
            Configuration(f"{policy} {ratio} {t}", "twinkv_edge", t, {"policy": policy, "ratio": ratio})
            for t in types
            for ratio in ratios
        ),
        *(Configuration(f"{policy} bounded {target} {t}", "twinkv_edge", t, bounded) for t in types),
    ]


def peers(
    model: str | Path, ratios: Sequence[float] = (0.5, 0.7), wanted: bool | None = None
) -> tuple[list[Configuration], str | None]:
    """KVPress by every ratio: always knorm, in bfloat16.

    Args:
        wanted: None takes it where it is installed and runs this model.

    Returns:
        The configurations, and why there are none although it is installed.

    Raises:
        InputError: It is wanted and cannot run; the message says why and what to do.
    """
    if wanted is False or (wanted is None and memory_peer.missing()):
        return [], None
    why = memory_peer.why_not(model)
    if why and wanted:
        raise InputError(f"cannot measure KVPress: {why}")
    if why:
        return [], f"without KVPress: {why}"
    name = "KVPress knorm {} (PyTorch, bfloat16)"
    return [Configuration(name.format(ratio), "kvpress", "bf16", {"ratio": ratio}) for ratio in ratios], None


def _child(job: dict[str, Any], peer: bool = False) -> dict[str, Any]:
    module = f"twinkv_edge.bench.{'memory_peer' if peer else 'memory_child'}"
    done = subprocess.run([sys.executable, "-m", module], input=json.dumps(job), capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise TwinKVError(f"{job.get('name', job['kind'])}: {last}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def run(
    model: str | Path,
    *,
    n_ctx: int = 8192,
    n_tokens: int = 7168,
    n_batch: int = 512,
    n_after: int = LIFE_AFTER,
    threads: int | None = None,
    which: Sequence[Configuration] | None = None,
    of_layers: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Measures every configuration in a process of its own.

    Args:
        of_layers: Layers of the real model, where `model` is its shape with fewer: caches are scaled up to it as well.

    Returns:
        {"model", "n_layer", "of_layers", "n_ctx", "n_tokens", "weights_bytes", "peer_weights_bytes", "rows": [...],
        "left_out": {configuration: why it failed or was not reached}};
        bytes over the weights, for kind "kvpress" over those that it holds itself
        (peak_prefill, created, prefilled, evicted, end), bytes of the cache (cache_*; llama.cpp's own is touched whole
        when it is made), those of all of_layers (whole_*), and times.

    Raises:
        InputError: Lengths that do not fit.
        TwinKVError: Every configuration failed; the message says why.
    """
    if n_tokens + n_after > n_ctx:
        raise InputError(f"{n_tokens} + {n_after} tokens do not fit n_ctx={n_ctx}: llama.cpp as it is could not run")
    common = {"model": str(model), "n_ctx": n_ctx, "n_tokens": n_tokens, "n_batch": n_batch, "n_after": n_after}
    common["threads"] = threads or os.cpu_count() or 1
    chosen = list(which if which is not None else configurations(n_tokens))
    facts = models.facts(model)
    scale = 1 if of_layers is None else of_layers / facts.n_layer
    base = _child({**common, "kind": "weights"})["process"] or 0
    peer_base = None
    if any(c.kind == "kvpress" for c in chosen):
        peer_base = _child({**common, "kind": "weights", "name": "KVPress"}, peer=True)["process"] or 0
    results, left_out = _measured(chosen, common, progress)
    if not results:
        raise TwinKVError("; ".join(f"{name}: {why}" for name, why in left_out.items()))
    rows = []
    for c, result in results:
        whole = sum(facts.bytes_per_token(c.cache_type, c.cache_type)) * n_ctx
        rows.append(_row(c, result, (peer_base or 0) if c.kind == "kvpress" else base, whole, scale))
    about = {"model": facts.name, "n_layer": facts.n_layer, "of_layers": of_layers}
    sizes = {"weights_bytes": base, "peer_weights_bytes": peer_base}
    return {**common, **about, **sizes, "rows": rows, "left_out": left_out}


def _measured(
    chosen: Sequence[Configuration], common: dict[str, Any], progress: Callable[[str, int, int], None] | None
) -> tuple[list[tuple[Configuration, dict[str, Any]]], dict[str, str]]:
    """What each process found, and why others did not: it failed, or Ctrl-C came when there was something to show."""
    results: list[tuple[Configuration, dict[str, Any]]] = []
    left_out: dict[str, str] = {}
    for number, c in enumerate(chosen):
        if progress:
            progress(c.name, number, len(chosen))
        job = {"kind": c.kind, "name": c.name, "type_k": c.cache_type, "type_v": c.cache_type}
        try:
            results.append((c, _child({**common, **job, "compression": c.compression}, c.kind == "kvpress")))
        except TwinKVError as why:
            left_out[c.name] = str(why).removeprefix(f"{c.name}: ")
        except KeyboardInterrupt:
            if not results:
                raise
            return results, left_out | {other.name: "interrupted" for other in chosen[number:]}
    return results, left_out


def _row(c: Configuration, result: dict[str, Any], base: int, whole: int, scale: float) -> dict[str, Any]:
    life = result["life"]
    if c.kind == "llama.cpp":
        result = {**result, "allocated": whole}
        life = [{**x, "cache": whole} for x in life]

    def last(stage: str) -> dict[str, Any]:
        found = [x for x in life if x["stage"] == stage]
        return found[-1] if found else {}

    def over(value: int | None) -> int | None:
        return None if value is None else value - base

    evicted = last("evicted") or last("prefill")
    caches = [x["cache"] for x in life if x["stage"] == "prefill" and x["cache"] is not None]
    at_most = max(caches) if caches else None
    # KVPress evicts layer by layer: only one is ever whole, so that more layers add what they keep
    more_layers = evicted.get("cache") if c.kind == "kvpress" else at_most
    return {
        "name": c.name,
        "kind": c.kind,
        "cache_type": c.cache_type,
        "created": over(last("created").get("process")),
        "prefilled": over(last("prefill").get("process")),
        "peak_prefill": over(result["peak_prefill"]),
        "peak_eviction": over(result["peak_eviction"]),
        "evicted": over(evicted.get("process")),
        "end": over(last("end").get("process")),
        "cells": evicted.get("cells"),
        "cache_allocated": result["allocated"],
        "cache_peak": at_most,
        "cache_evicted": evicted.get("cache"),
        "cache_end": last("end").get("cache"),
        "whole_peak": None if at_most is None else round(at_most + (scale - 1) * (more_layers or 0)),
        "whole_evicted": round(scale * evicted["cache"]) if evicted.get("cache") is not None else None,
        "prefill_s": result["prefill_s"],
        "evict_s": result["evict_s"],
        "moved_s": result["moved_s"],
        "decode_ms": result["decode_ms"],
        "life": [{**x, "process": over(x["process"])} for x in life],
    }


# Columns of the table: its head, and the key of a row. MB are 2^20 bytes.
_COLUMNS = (
    ("created", "created"),
    ("after prefill", "prefilled"),
    ("peak in prefill", "peak_prefill"),
    ("after eviction", "evicted"),
    ("{n_after} tokens later", "end"),
    ("cache allocated", "cache_allocated"),
    ("cache at most", "cache_peak"),
    ("cache after eviction", "cache_evicted"),
)
_SCALED = (("at most, {of_layers} layers", "whole_peak"), ("after eviction, {of_layers} layers", "whole_evicted"))


def markdown(result: dict[str, Any]) -> str:
    """The table, as Markdown: MB, those of the process less the weights; then the cache's own."""
    scaled = result["of_layers"] is not None and result["of_layers"] != result["n_layer"]
    columns = _COLUMNS + (_SCALED if scaled else ())
    heads = [head.format(**result) for head, _ in columns]
    lines = [
        f"{result['model']}, {result['n_tokens']:,} tokens in a context of {result['n_ctx']:,}, batches of "
        f"{result['n_batch']}, {result['threads']} threads; MB, without the {result['weights_bytes'] / MIB:.0f} of the "
        "weights and libraries.",
    ]
    if scaled:
        lines.append(
            f"Measured with {result['n_layer']} of the model's {result['of_layers']} layers; the columns that say so "
            "are the cache scaled up to all of them."
        )
    if result.get("peer_weights_bytes"):
        lines.append(
            f"KVPress holds the weights dequantized to bfloat16: the {result['peer_weights_bytes'] / MIB:.0f} of those "
            "and of its libraries are subtracted from its rows."
        )
    lines += [
        "",
        f"| configuration | {' | '.join(heads)} | cells | prefill s | evict s | decode ms |",
        "|---|" + "---:|" * (len(heads) + 4),
    ]

    def mb(value: int | None) -> str:
        return "" if value is None else f"{value / MIB:.0f}" if value >= 100 * MIB else f"{value / MIB:.1f}"

    for r in result["rows"]:
        numbers = [mb(r[key]) for _, key in columns]
        times = [f"{r['prefill_s']:.1f}", f"{r['evict_s']:.2f}" if r["evict_s"] else "", f"{r['decode_ms']:.1f}"]
        lines.append(f"| {r['name']} | {' | '.join(numbers)} | {r['cells']:,} | {' | '.join(times)} |")
    lines += ["", *(f"Without {name}: {why}" for name, why in result["left_out"].items())]
    return "\n".join(lines).rstrip()


def _steps(life: list[dict[str, Any]], batches: int) -> list[float]:
    """Where each note stands in the plot: a prefill, whatever it was noted by, is as wide as its batches."""
    widths = [1.0] * len(life)
    reading = [i for i, x in enumerate(life) if x["stage"] == "prefill"]
    for i in reading:
        widths[i] = batches / len(reading)
    return list(itertools.accumulate(widths))


def plot(result: dict[str, Any], path: str | Path) -> None:
    """Resident memory over the life of a session, one line per configuration, as a PNG.

    Raises:
        InputError: matplotlib is not installed, or the file cannot be written.
    """
    plt = pyplot()
    fig, ax = plt.subplots(figsize=(11, 5), layout="constrained")
    batches = -(-result["n_tokens"] // result["n_batch"])
    lines = {r["name"]: [x["process"] / MIB for x in r["life"]] for r in result["rows"]}
    top = 1.3 * max((max(lines[r["name"]]) for r in result["rows"] if r["kind"] != "kvpress"), default=math.inf)
    if all(max(line) <= 2 * top for line in lines.values()):  # else a peer's would flatten the others
        top = math.inf
    for r in result["rows"]:
        line = lines[r["name"]]
        style = {"llama.cpp": "--", "kvpress": ":"}.get(r["kind"], "-")
        label = r["name"] if max(line) <= top else f"{r['name']}: up to {max(line):,.0f} MB"
        ax.plot(_steps(r["life"], batches), line, style, label=label, linewidth=1.6)
    if top < math.inf:
        ax.set_ylim(top=top)
    ax.set_xlabel(f"batches of {result['n_batch']} tokens, then eviction, then every 64 decoded tokens")
    ax.set_ylabel("MB in memory, weights subtracted")
    of = f", {result['n_layer']} of {result['of_layers']} layers" if result["of_layers"] else ""
    ax.set_title(f"{result['model']}{of}: {result['n_tokens']:,} tokens, n_ctx {result['n_ctx']:,}")
    ax.set_ylim(bottom=0)
    ax.grid(alpha=0.3)
    fig.legend(fontsize=8, loc="outside right upper")
    save(fig, path)
