"""`twinkv-edge inspect DOC`: what policies keep of a document, as a page or as a table."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from .._version import __version__
from ..compression import CHOICES, Compression
from ..errors import InputError
from .documents import read_document
from .options import AsJson, CompressionOptions, ModelOptions, choice, grouped
from .output import megabytes, note, print_json, progress, share, table
from .room import cells_for, check_model

if TYPE_CHECKING:
    from ..inspect import Inspection
    from ..llama import CompressedLlama
    from ..models import ModelFacts
    from .prompt import Vocabulary


def _keep(help: str, metavar: str | None = None) -> Any:
    return typer.Option(help=help, metavar=metavar, rich_help_panel="What to keep")


@dataclass(frozen=True)
class PolicyOptions:
    """The fields of `Compression` that choose among the tokens of a whole prompt, and several policies."""

    policy: Annotated[
        list[str], _keep("Eviction policy; repeat it to see several side by side (default: snapkv).", "NAME")
    ] = field(default_factory=list)
    ratio: Annotated[float, _keep("Fraction of the cache to REMOVE, at least 0 and below 1.")] = 0.5
    target_tokens: Annotated[int | None, _keep("Keep this many tokens per head, instead of a fraction.", "K")] = None
    repair: Annotated[str, _keep("Swap redundant kept tokens for lost unique ones.", choice(CHOICES["repair"]))] = (
        Compression().repair
    )
    layout: Annotated[str, _keep("One set of tokens per head, or one for all.", choice(CHOICES["layout"]))] = "head"
    tau: Annotated[float | None, _keep("Cosine similarity from which two keys are twins (default: the model's).")] = (
        None
    )
    local_window: Annotated[int, _keep("Tokens nearer to each other than this are never twins.")] = (
        Compression().local_window
    )
    n_sink: Annotated[int, _keep("Leading tokens that are always kept.")] = Compression().n_sink
    n_recent: Annotated[int, _keep("Trailing tokens that are always kept.")] = Compression().n_recent
    key_space: Annotated[str, _keep("Which keys are compared.", choice(CHOICES["key_space"]))] = "rope"
    policy_options: Annotated[
        list[str], _keep("An option of the policy, e.g. seed=1, where there is one; may be repeated.", "NAME=VALUE")
    ] = field(default_factory=list)

    def settings(self) -> list[Compression]:
        """One per policy, checked.

        Raises:
            InputError: A value is out of range, a policy is unknown or named twice.
        """
        names = self.policy or [Compression().policy]
        if len(set(names)) < len(names):
            raise InputError("a policy is named twice: give each once")
        if self.policy_options and len(names) > 1:
            raise InputError("--policy-options belong to one policy, and there are several: give them one by one")
        shared = {k: v for k, v in vars(self).items() if k != "policy"}
        return [CompressionOptions(policy=name, **shared).settings() for name in names]


@grouped
def inspect_document(
    *,
    documents: Annotated[list[str], typer.Argument(help='Text file (UTF-8), or "-"; several with --twins.')],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write a page that shows every token.", metavar="HTML")
    ] = None,
    question: Annotated[
        str | None, typer.Option("--question", "-q", help="Ask this after the document, as `ask` does.")
    ] = None,
    twins: Annotated[
        bool, typer.Option("--twins", help="Only count: the share of tokens with a twin, of one or more documents.")
    ] = False,
    sweep: Annotated[bool, typer.Option("--sweep", help="With --twins: at other thresholds too.")] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="With --twins: write a picture (PNG) here too.", metavar="PNG")
    ] = None,
    json: AsJson = False,
    keep: PolicyOptions,
    model: ModelOptions,
) -> None:
    """Show what policies keep of a document, head by head, which tokens have twins, and what the repair swaps.

    Without -o a table goes to standard output. With it, one HTML file that needs nothing else, not even a network.
    Nothing is evicted.
    """
    if twins:
        if output is not None or question is not None:
            raise InputError("--twins only counts: leave out -o and --question")
        _twins(documents, keep, model, sweep=sweep, plot=plot, json=json)
        return
    if len(documents) > 1:
        raise InputError("give one document; several go with --twins")
    if sweep or plot is not None:
        raise InputError("--sweep and --plot go with --twins")
    job = prepare(documents[0], question, keep.settings(), model, output)
    for remark in job.notes:
        note(remark)
    found = run(job, model)
    if output is not None:
        write_page(found, job, output)
    result = found.summary() | {"document": job.title, "page": output}
    if json:
        print_json(result)
    elif output is not None:
        note(f"wrote {output} ({megabytes(output.stat().st_size)} MB): open it in a browser")
    else:
        show(result)


def _twins(
    documents: list[str], keep: PolicyOptions, model: ModelOptions, *, sweep: bool, plot: Path | None, json: bool
) -> None:
    from ..inspect.prevalence import markdown
    from .inspect_twins import measure

    result = measure(documents, keep.settings()[0], model, sweep=sweep, plot=plot)
    if json:
        print_json(result)
    else:
        print(markdown(result))


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
        "no repair" if first.repair == "none" else f"{first.repair} repair",
        f"τ {found.tau:g}",
        f"{100 * found.prevalence.mean():.0f} % of tokens have a twin",
    ]
    about = {"title": job.title, "chips": chips, "version": __version__}
    page = render(payload(found, texts, control, job.tokens, about))
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", newline="\n", dir=output.absolute().parent, prefix=f".{output.name}.", delete=False
        ) as file:
            unfinished = Path(file.name)
            try:
                file.write(page)
                file.close()
                umask = os.umask(0)
                os.umask(umask)
                unfinished.chmod(0o666 & ~umask)  # temporary files are private; this one is to be passed on
                unfinished.replace(output)
            except BaseException:
                unfinished.unlink(missing_ok=True)
                raise
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
