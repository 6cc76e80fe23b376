"""The larger measurements of `twinkv-edge bench`: memory, speed, kernels, needle. Tables, plots, --json."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..compression import Compression
from ..errors import InputError
from ..models.ggml_types import CACHE_TYPES
from .options import AsJson, ModelOptions, PlotFile, choice, grouped
from .output import note, show_measured

Like = Annotated[
    str | None, typer.Option(help="Random weights in the shape of this model, instead of --model.", metavar="SHAPE")
]
Layers = Annotated[int | None, typer.Option(help="With --like: so many layers.")]


def _path(model: ModelOptions, like: str | None, layers: int | None, n_tokens: int) -> Path:
    """The model's file, made if need be; a shape whose real model was trained for fewer tokens gets as many."""
    from .. import models
    from ..models.shapes import shape_of

    if like is None:
        if layers is not None:
            raise InputError("--layers goes with --like: a model's file has the layers it has")
        return model.path()
    if model.model is not None:
        raise InputError("give --model or --like, not both")
    trained = n_tokens if n_tokens > shape_of(like).n_ctx_train else None
    return models.random_model(like, layers, n_ctx_train=trained)


def _say(name: str, number: int, total: int) -> None:
    note(f"[{number + 1}/{total}] {name}")


@grouped
def memory(
    *,
    tokens: Annotated[int, typer.Option(help="Tokens of the document.")] = 7168,
    more: Annotated[int, typer.Option(help="Tokens decoded after it.")] = 512,
    policy: Annotated[str, typer.Option(help="Eviction policy.")] = "knorm",
    ratio: Annotated[list[float], typer.Option(help="Fraction removed; may be repeated.")] = [0.5, 0.7],  # noqa: B006
    cache_type: Annotated[
        list[str], typer.Option(help="Type of keys and values; may be repeated.", metavar=choice(CACHE_TYPES))
    ] = ["f16", "q8_0", "q4_0"],  # noqa: B006 (typer)
    like: Like = None,
    layers: Layers = None,
    limits: Annotated[
        bool | None, typer.Option(help="Measure the bounds the cache is held to as well (default: without --like).")
    ] = None,
    peers: Annotated[
        bool | None, typer.Option(help="Measure KVPress on the same tokens as well (default: where it is installed).")
    ] = None,
    plot: PlotFile = None,
    json: AsJson = False,
    model: ModelOptions,
) -> None:
    """What the cache costs over the life of a session: llama.cpp as it is, and evicted, one process each."""
    from ..bench import limits as bounds
    from ..bench import memory as bench
    from ..models.shapes import shape_of

    model.check()
    threads, path = model.n_threads(), _path(model, like, layers, tokens + more)
    kvpress, why_not = bench.peers(path, ratio, peers)
    if why_not:
        note(why_not)
    result = bench.run(
        path,
        n_ctx=model.n_ctx or 8192,
        n_tokens=tokens,
        n_after=more,
        n_batch=model.n_batch,
        threads=threads,
        which=[*bench.configurations(tokens, policy, ratio, cache_type), *kvpress],
        of_layers=shape_of(like).n_layer if like else None,
        progress=_say,
    )
    measured = limits if limits is not None else like is None
    found = bounds.run(path, threads=threads, progress=note) if measured else []
    result["limits"] = [limit.to_dict() for limit in found]
    text = "\n\n".join([bench.markdown(result), *([bounds.markdown(found)] if found else [])])
    show_measured(result, text, json=json, plot=plot, draw=bench.plot)


@grouped
def speed(
    *,
    tokens: Annotated[int, typer.Option(help="Tokens of the document.")] = 4096,
    ratio: Annotated[float, typer.Option(help="Fraction of the cache to remove.")] = 0.5,
    repair: Annotated[str, typer.Option(help="Repair mode.")] = "paper",
    policy: Annotated[list[str], typer.Option(help="Only this policy; may be repeated.")] = [],  # noqa: B006 (typer)
    repeats: Annotated[int, typer.Option(help="Runs of each; medians are shown.")] = 3,
    like: Like = None,
    layers: Layers = None,
    json: AsJson = False,
    model: ModelOptions,
) -> None:
    """What every policy costs, as shares of a prefill: capture, score, repair, evict."""
    from ..bench import speed as bench

    model.check()
    result = bench.run(
        _path(model, like, layers, tokens + 64),
        n_tokens=tokens,
        ratio=ratio,
        repair=repair,
        names=policy or None,
        threads=model.n_threads(),
        repeats=repeats,
        progress=_say,
    )
    show_measured(result, bench.markdown(result), json=json)


@grouped
def kernels(
    *,
    size: Annotated[list[int], typer.Option(help="Number of tokens n; may be repeated.")] = [1024, 8192],  # noqa: B006
    dim: Annotated[list[int], typer.Option(help="Dimensions d of a key; may be repeated.")] = [64, 128],  # noqa: B006
    backend: Annotated[list[str], typer.Option(help="Only this backend; may be repeated.")] = [],  # noqa: B006 (typer)
    repeats: Annotated[int, typer.Option(help="Runs of each; medians are shown.")] = 5,
    real_keys: Annotated[
        int | None,
        typer.Option(
            help="Also count the twins of so many tokens in a real cache, against the definition.", metavar="N"
        ),
    ] = None,
    plot: PlotFile = None,
    json: AsJson = False,
    model: ModelOptions,
) -> None:
    """Time the twin kernels against a numpy reference and this machine's own peaks.

    --real-keys fills a cache with N tokens of text and checks every count of every head.
    """
    from ..bench import kernels as bench
    from ..bench import real_keys as cache

    model.check()
    if real_keys is not None and real_keys < 1:
        raise InputError(f"--real-keys is {real_keys}: give a number of tokens, 1 or more")
    n_threads = model.n_threads()
    result = bench.run(
        sizes=size,
        dims=dim,
        backends=backend or None,
        repeats=repeats,
        n_threads=n_threads,
        progress=_say,
    )
    text = bench.markdown(result)
    if real_keys is not None:
        result["real_keys"] = cache.run(model.path(), n_tokens=real_keys, n_threads=n_threads, progress=_say)
        text += "\n\n" + cache.markdown(result["real_keys"])
    show_measured(result, text, json=json, plot=plot, draw=bench.plot)


@grouped
def needle(
    haystack: Annotated[Path, typer.Argument(help="Prose to hide numbers in; its length is the prompt's.")],
    *,
    samples: Annotated[int, typer.Option(help="Needles, one seed each.")] = 12,
    seed: Annotated[int, typer.Option(help="The first one's seed.")] = 0,
    ratio: Annotated[list[float], typer.Option(help="Fraction removed; may be repeated.")] = [0.5, 0.7],  # noqa: B006
    policy: Annotated[list[str], typer.Option(help="Only this policy; may be repeated.")] = [],  # noqa: B006 (typer)
    tau: Annotated[float | None, typer.Option(help="Twin threshold (default: the model's).")] = None,
    plot: PlotFile = None,
    json: AsJson = False,
    model: ModelOptions,
) -> None:
    """Accuracy of finding a hidden number: every policy alone, with the paper's repair, and with ours."""
    from ..bench import needle as bench
    from ..bench.quality.replies import SEQUENCES
    from .documents import read_document
    from .generation import load

    model.check()
    if samples < 1:
        raise InputError(f"--samples is {samples}: give a whole number, 1 or more")
    text = read_document(str(haystack))
    llm = load(model, model.n_ctx or 4096, Compression(), n_seq_max=SEQUENCES)
    try:
        result = bench.table(
            llm, text, samples=samples, first=seed, ratios=ratio, names=policy or None, tau=tau, progress=note
        )
    finally:
        llm.close()
    show_measured(result, bench.markdown(result), json=json, plot=plot, draw=bench.plot)
