"""`twinkv-edge bench`: one sub-command per measurement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ..compression import CHOICES, Compression
from ..errors import InputError
from .options import AsJson, ModelOptions, choice, grouped
from .output import megabytes, print_json, progress, share, table, times_faster

if TYPE_CHECKING:
    from ..bench.evict import EvictionResult

app = typer.Typer(no_args_is_help=True, help="Measure memory and speed on this machine.")


@app.callback()
def _bench() -> None:
    """Measure memory and speed on this machine."""


@app.command()
@grouped
def evict(
    *,
    tokens: Annotated[int, typer.Option(help="Tokens of text to fill the cache with.")] = 6144,
    target_tokens: Annotated[int, typer.Option(help="Tokens that each head keeps.")] = 1024,
    policy: Annotated[str, typer.Option(help="Eviction policy.")] = "knorm",
    repair: Annotated[str, typer.Option(help="Repair mode.", metavar=choice(CHOICES["repair"]))] = "auto",
    timed: Annotated[int, typer.Option(help="Tokens to decode for each median.")] = 16,
    json: AsJson = False,
    model: ModelOptions,
) -> None:
    """Evict from a long text's cache: memory that comes back, and decoding speed before and after, in one run.

    The cache has 8192 cells unless --n-ctx says otherwise.
    """
    from .. import policies
    from ..bench.evict import measure
    from .generation import load

    model.check()
    for name, value in (("--tokens", tokens), ("--timed", timed), ("--target-tokens", target_tokens)):
        if value < 1:
            raise InputError(f"{name} is {value}: give a whole number, 1 or more")
    settings = Compression(policy=policy, repair=repair, target_tokens=target_tokens)  # type: ignore[arg-type]
    policies.create(policy)
    settings.budget(tokens)
    llm = load(model, model.n_ctx or 8192, settings)
    try:
        with progress("reading", tokens, "tokens") as done:
            result = measure(llm, tokens, settings, timed, done)
        name = llm.facts.name
    finally:
        llm.close()
    if json:
        print_json({"model": name, "type_k": model.type_k, "type_v": model.type_v, **result.to_dict()})
    else:
        _show(name, model, result)


def _show(name: str, model: ModelOptions, result: EvictionResult) -> None:
    found = result.to_dict()
    before, after = found["decode_ms_median_before"], found["decode_ms_median_after"]
    rows = [
        ("cells per head", f"{result.n_before:,}", f"{result.n_after:,}", share(result.n_after, result.n_before)),
        (
            "cache in memory, MB",
            megabytes(result.cache_before),
            megabytes(result.cache_after),
            share(result.cache_after, result.cache_before),
        ),
        ("process in memory, MB", megabytes(result.process_before), megabytes(result.process_after), ""),
        ("decode, ms/token", f"{before:.2f}", f"{after:.2f}", f"{times_faster(before, after)} as fast"),
    ]
    console = Console(highlight=False, markup=False)
    console.print(
        f"{name}, {model.type_k}/{model.type_v} cache, policy {result.policy}, repair {result.repair} "
        f"({result.swaps:,} swaps), {result.n_threads} threads",
        soft_wrap=True,
    )
    console.print(table(("", "before", "after", ""), rows))
    came_back = f"{100 * result.cache_returned:.1f} % of it by the cache"
    if result.process_returned is not None:
        came_back += f", {100 * result.process_returned:.1f} % by the whole process"
    console.print(f"evicted {megabytes(result.bytes_evicted)} MB; came back: {came_back}", soft_wrap=True)
    stages = ", ".join(f"{stage} {s:.2f}" for stage, s in result.seconds.items())
    console.print(
        f"seconds: {stages}; decode: medians of {len(result.decode_ms_before)} tokens, taken back", soft_wrap=True
    )
