"""`twinkv-edge bench quality`: tasks answered on compressed caches, alone and repaired."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..compression import CHOICES
from ..errors import InputError
from .options import AsJson, ModelOptions, PlotFile, choice, grouped, usable_cores
from .output import note, show_measured

if TYPE_CHECKING:
    from ..bench.quality.settings import Config, Settings


@grouped
def quality(
    *,
    task: Annotated[
        list[str], typer.Option(help="A task, or a group of them: ruler, continuation, ...; may be repeated.")
    ] = ["ruler"],  # noqa: B006 (typer)
    samples: Annotated[int, typer.Option(help="Samples of every task.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
    length: Annotated[int, typer.Option(help="Tokens of a prompt with its answer.")] = 2048,
    policy: Annotated[list[str], typer.Option(help="Only this policy; may be repeated (default: six).")] = [],  # noqa: B006
    ratio: Annotated[list[float], typer.Option(help="Fraction removed; may be repeated.")] = [0.5, 0.7],  # noqa: B006
    repair: Annotated[
        list[str],
        typer.Option(help="Only this repair beside none; may be repeated.", metavar=choice(CHOICES["repair"])),
    ] = [],  # noqa: B006
    layout: Annotated[list[str], typer.Option(help="May be repeated.", metavar=choice(CHOICES["layout"]))] = ["head"],  # noqa: B006
    tau: Annotated[list[float], typer.Option(help="Twin threshold (default: the model's); may be repeated.")] = [],  # noqa: B006
    question: Annotated[
        str,
        typer.Option(
            help="window: policies see the question, in the recent window; after: it comes after the eviction.",
            metavar="[window|after]",
        ),
    ] = "window",
    continuation: Annotated[int, typer.Option(help="Tokens that a text is continued for.")] = 256,
    text: Annotated[list[Path], typer.Option(help="A text for continue_files; may be repeated.")] = [],  # noqa: B006
    data: Annotated[Path | None, typer.Option(help="Folder with the files of tasks that are loaded.")] = None,
    min_full: Annotated[
        float, typer.Option(help="Leave tasks out of the means that the full cache does worse than this.")
    ] = 0.0,
    workers: Annotated[int, typer.Option(help="Processes, each with a model of its own.")] = 1,
    out: Annotated[
        Path, typer.Option(help="Results, a line per sample; a run that was stopped goes on where it was.")
    ] = Path("quality.jsonl"),
    plot: PlotFile = None,
    json: AsJson = False,
    model: ModelOptions,
) -> None:
    """Does it keep what matters? Tasks answered on compressed caches, every policy alone and repaired.

    Every sample is read once, and answered under all settings. Results are appended to --out: a run that was stopped
    goes on when the same command is given again, and more tasks or samples may be asked for then.
    """
    from .. import tasks
    from ..bench.quality import report, runner, settings, tables
    from ..bench.quality.results import Results

    model.check()
    for name, value in (("--samples", samples), ("--workers", workers), ("--length", length)):
        if value < 1:
            raise InputError(f"{name} is {value}: give a whole number, 1 or more")
    if question not in settings.QUESTIONS:
        raise InputError(f"--question is {question!r}: choose window or after")
    configs = settings.configurations(
        policy or settings.POLICIES, ratio, repair or settings.REPAIRS, layout, tau or [None]
    )
    path, threads = _path(model), _threads(model, workers, out)
    chosen = replace(
        _settings(model, length, configs, threads),
        seed=seed,
        question=question,
        continuation=continuation,
        texts=tuple(str(t) for t in text),
    )
    wanted = settings.Wanted(tuple(tasks.chosen(task)), samples, data, tuple(text))
    results = Results(out, chosen)
    skipped = runner.run(runner.Bench(path, chosen, wanted), results, workers, note)
    asked = [x for (name, index), x in results.lines.items() if name in wanted.tasks and index < samples]
    if not asked:
        raise InputError("no task could be run: " + "; ".join(f"{t}: {why}" for t, why in skipped.items()))
    result: dict[str, Any] = {**tables.tables(chosen, asked, min_full), "skipped": skipped}
    show_measured(result, report.markdown(result), json=json, plot=plot, draw=report.plot)


def _path(model: ModelOptions) -> Path:
    path = model.path()
    if not path.is_file():
        raise InputError(f"there is no model file {path}")
    return path


def _settings(model: ModelOptions, length: int, configs: tuple[Config, ...], threads: int) -> Settings:
    from ..bench.quality.settings import Settings

    path = _path(model)
    return Settings(
        model=f"{path.name} ({path.stat().st_size} bytes)",
        length=length,
        seed=0,
        question="window",
        configs=configs,
        threads=threads,
        type_k=model.type_k.lower(),
        type_v=model.type_v.lower(),
        n_batch=model.n_batch,
    )


def _threads(model: ModelOptions, workers: int, out: Path) -> int:
    """Threads of each worker: as asked, as the run had that goes on, or an equal share of the cores."""
    from ..bench.quality.results import read

    if model.threads is None and out.is_file():
        found = read(out)[0]
        if found is not None:
            return found.threads
    return model.n_threads() if model.threads is not None else max(1, usable_cores() // workers)


@grouped
def needle_grid(
    haystack: Annotated[Path | None, typer.Argument(help="Prose to hide numbers in (default: essays shipped).")] = None,
    *,
    length: Annotated[list[int], typer.Option(help="Tokens with the answer; may be repeated.")] = [512, 1024, 2048],  # noqa: B006
    depth: Annotated[list[float], typer.Option(help="0 start, 1 end; may be repeated.")] = [0.0, 0.25, 0.5, 0.75, 1.0],  # noqa: B006
    samples: Annotated[int, typer.Option(help="Needles of every length and depth.")] = 4,
    policy: Annotated[list[str], typer.Option(help="May be repeated.")] = ["snapkv"],  # noqa: B006
    ratio: Annotated[list[float], typer.Option(help="Fraction removed; may be repeated.")] = [0.5],  # noqa: B006
    repair: Annotated[
        list[str],
        typer.Option(help="Only this repair beside none; may be repeated.", metavar=choice(CHOICES["repair"])),
    ] = [],  # noqa: B006
    plot: PlotFile = None,
    json: AsJson = False,
    model: ModelOptions,
) -> None:
    """Where is a hidden number still found? Accuracy over depth and length, with a heat map."""
    from ..bench import needle_grid as bench
    from ..bench.quality import runner, settings
    from ..tasks.words import essay_sentences
    from .documents import read_document

    model.check()
    for name, values in (("--samples", [samples]), ("--length", length)):
        if min(values) < 1:
            raise InputError(f"{name} is {min(values)}: give a whole number, 1 or more")
    text = " ".join(essay_sentences()) if haystack is None else read_document(str(haystack))
    configs = settings.configurations(policy, ratio, repair or settings.REPAIRS)
    chosen = _settings(model, max(length), configs, model.n_threads())
    llm = runner.Bench(_path(model), chosen, settings.Wanted((), samples)).open()
    try:
        result = bench.run(llm, text, lengths=length, depths=depth, samples=samples, configs=configs, progress=note)
    finally:
        llm.close()
    show_measured(result, bench.markdown(result), json=json, plot=plot, draw=bench.plot)
