"""`twinkv-edge probe`: measurements of the premise behind eviction policies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ..compression import Compression
from ..errors import InputError
from .documents import read_document
from .options import AsJson, ModelOptions, PlotFile, grouped
from .output import note, progress, show_measured
from .room import check_model, round_up

if TYPE_CHECKING:
    from .prompt import Vocabulary

app = typer.Typer(no_args_is_help=True, help="Probe what eviction policies take for granted.")


@app.callback()
def _probe() -> None:
    """Probe what eviction policies take for granted."""


@app.command()
@grouped
def utility(
    *,
    document: Annotated[
        str | None, typer.Argument(help="Text file with blank lines between paragraphs.", metavar="[DOC|-]")
    ] = None,
    question: Annotated[str | None, typer.Option("--question", "-q", help="What to ask about it.")] = None,
    answer: Annotated[str | None, typer.Option("--answer", "-a", help="The right answer.")] = None,
    samples: Annotated[int, typer.Option(help="Generated samples, where no question is given.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the first sample, and of the permutations.")] = 0,
    plot: PlotFile = None,
    json: AsJson = False,
    model: ModelOptions,
) -> None:
    """Does attention know what the answer needs? Leave out one paragraph at a time and see.

    With a question and its right answer: about the document's paragraphs. Without: about numbers hidden in prose, the
    document's or our own.
    """
    from ..bench.prose import PROSE
    from ..probe import utility as bench
    from ..probe.samples import about, generated
    from .generation import load
    from .prompt import Vocabulary

    if (question is None) != (answer is None):
        raise InputError("a question needs its right answer, and an answer its question: give -q and -a")
    if question is not None and document is None:
        raise InputError("give the document that the question is about")
    if samples < 1 or seed < 0:
        raise InputError(f"--samples is {samples} and --seed {seed}: give at least 1 sample, and a seed from 0 on")
    text = PROSE if document is None else read_document(document)
    if question is not None:
        chosen = [about(text, question, str(answer))]
    else:
        chosen = [generated(text, seed + k) for k in range(samples)]
    facts = check_model(model, "head")
    vocabulary = Vocabulary.load(facts.path)
    longest = max(_length(vocabulary, s.before, s.question, s.answer, *s.paragraphs) for s in chosen)
    if longest >= facts.n_ctx_train:
        raise InputError(
            f"a sample is {longest} tokens, and {facts.name} was trained for {facts.n_ctx_train}: shorten the document"
        )
    n_ctx = model.n_ctx or round_up(longest + 1)
    if n_ctx < longest:
        raise InputError(f"a sample is {longest} tokens, and the cache has {n_ctx} cells: leave out --n-ctx")
    llm = load(model, n_ctx, Compression(policy="knorm"))
    chunks, found = [], []
    try:
        for number, sample in enumerate(chosen):
            if len(chosen) > 1:
                note(f"[{number + 1}/{len(chosen)}] {len(sample.paragraphs)} paragraphs")
            with progress("leaving out", len(sample.paragraphs) + 1, "runs") as done:
                each, numbers = bench.probe(llm, sample, number, lambda k, _, done=done: done(k))  # type: ignore[misc]
            chunks += each
            found.append(numbers)
    finally:
        llm.close()
    result = bench.summary(facts.name, chunks, found, seed)
    show_measured(result, bench.markdown(result), json=json, plot=plot, draw=bench.plot)


def _length(vocabulary: Vocabulary, *texts: str) -> int:
    return 1 + sum(len(vocabulary.tokenize(text, special=False)) for text in texts)
