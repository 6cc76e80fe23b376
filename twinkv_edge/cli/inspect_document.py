"""`twinkv-edge inspect DOC`: what policies keep of a document, as a page or as a table."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from .._version import __version__
from ..atomic import replacing
from ..errors import InputError
from .documents import read_document
from .options import ModelOptions
from .output import megabytes, progress, share, table
from .room import cells_for, check_model

if TYPE_CHECKING:
    from ..compression import Compression
    from ..inspect import Inspection
    from ..llama import CompressedLlama
    from ..models import ModelFacts
    from .prompt import Vocabulary


@dataclass
class Job:
    """What is to be looked at, all of it checked before a model is loaded."""

    title: str
    settings: list[Compression]
    facts: ModelFacts
    vocabulary: Vocabulary
    tokens: list[int]
    n_ctx: int
    notes: list[str] = field(default_factory=list)


def prepare(
    document: str, question: str | None, settings: list[Compression], model: ModelOptions, output: Path | None
) -> Job:
    """Reads the document and the model's vocabulary, and sees that everything fits.

    Raises:
        InputError: Something does not, or is out of range, or the page cannot be written where it is wanted.
        UnsupportedModelError: The model keeps no cache that can be rewritten.
    """
    from .prompt import ChatPrompt, Vocabulary, question_about, tail_length

    text = read_document(document)
    if output is not None:
        _check_output(output, document)
    facts = check_model(model, settings[0].layout)
    vocabulary = Vocabulary.load(facts.path)
    notes: list[str] = []
    if question is None:
        tokens = vocabulary.tokenize(text, add_bos=True, special=False)
    else:
        if not question.strip():
            raise InputError("the question is empty")
        prompt = ChatPrompt(vocabulary)
        tokens = prompt.begin([question_about(text, question)])
        tail = tail_length(prompt, text, tokens)
        if tail > settings[0].n_recent:
            notes.append(f"n_recent raised to {tail}, to cover the question and the template")
            settings = [s.with_(n_recent=tail) for s in settings]
    for each in settings:
        each.budget(len(tokens))  # raises when it is too small
    n_ctx = cells_for(facts, settings[0], model, len(tokens), len(tokens), 1)
    title = "standard input" if document == "-" else Path(document).name
    return Job(title, settings, facts, vocabulary, tokens, n_ctx, notes)


def _check_output(output: Path, document: str) -> None:
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise InputError(f"cannot write {output}: give a file in a folder that exists")
    if document != "-" and output.exists() and output.samefile(document):
        raise InputError(f"{output} is the document: write the page somewhere else")


def run(job: Job, model: ModelOptions) -> Inspection:
    """Evaluates the document and looks at its cache."""
    from ..inspect import gather
    from .generation import load

    llm: CompressedLlama = load(model, job.n_ctx, job.settings[0])
    try:
        llm.capture_for(*job.settings)
        with progress("reading", len(job.tokens), "tokens") as done:
            llm.eval(job.tokens, lambda n, total, cells: done(n))
        with progress("looking", 100, "%") as done:
            return gather(llm, job.settings, lambda step, steps: done(100 * step // steps))
    finally:
        llm.close()


def write_page(found: Inspection, job: Job, output: Path) -> None:
    """Writes the page, whole or not at all.

    Raises:
        InputError: The system refuses.
    """
    from ..inspect.payload import payload, pieces
    from ..inspect.render import render

    texts, control = pieces(job.vocabulary, job.tokens)
    first = job.settings[0]
    kept = f"{first.target_tokens} tokens kept" if first.target_tokens else f"ratio {first.ratio:g}"
    chips = [
        found.model,
        f"{len(job.tokens):,} tokens",
        f"{found.counts.shape[0]} layers × {found.counts.shape[1]} KV heads",
        kept,
        "no repair" if first.repair == "none" else f"{first.repair_mode} repair",
        f"τ {found.tau:g}",
        f"{100 * found.prevalence.mean():.0f} % of tokens have a twin",
    ]
    about = {"title": job.title, "chips": chips, "version": __version__}
    page = render(payload(found, texts, control, job.tokens, about))
    umask = os.umask(0)
    os.umask(umask)
    try:
        with replacing(output, mode=0o666 & ~umask) as file:  # not private: it is to be passed on
            file.write(page.encode())
    except OSError as e:
        raise InputError(f"cannot write {output}: {(e.strerror or str(e)).lower()}") from e


def show(result: dict[str, Any]) -> None:
    """The summary as tables, on stdout."""
    console = Console(highlight=False, markup=False)
    console.print(
        f"{result['document']}: {result['tokens']:,} tokens; {result['model']}, {result['layers']} layers × "
        f"{result['kv_heads']} KV heads; tau {result['tau']:g}",
        soft_wrap=True,
    )
    policies = result["policies"]
    rows = []
    for layer, heads in enumerate(result["twins"]["share_by_layer_and_head"]):
        twins = f"{100 * sum(heads) / len(heads):.1f} ({100 * min(heads):.0f}-{100 * max(heads):.0f})"
        rows.append((str(layer), twins, *(f"{100 * p['retention_by_layer'][layer]:.1f}" for p in policies)))
    rows.append(
        ("all", f"{100 * result['twins']['share']:.1f}", *(f"{100 * p['retention']:.1f}" for p in policies)),
    )
    console.print(table(("layer", "with a twin, % (heads)", *(f"{p['label']} keeps, %" for p in policies)), rows))
    before = result["bytes_before"]
    console.print(
        table(
            ("policy", "swaps", "lost", "lost after repair", "cache, MB", "of full"),
            [
                (
                    p["label"],
                    f"{p['swaps']:,}",
                    f"{p['lost_before_repair']:,}",
                    f"{p['lost_after_repair']:,}",
                    megabytes(p["bytes_after"]),
                    share(p["bytes_after"], before),
                )
                for p in policies
            ],
        )
    )
    console.print("lost: evicted tokens, over all heads, that have no twin in what is kept", soft_wrap=True)
