"""`twinkv-edge inspect`: what policies keep of a document, how many twins there are, or what is in a session."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from ..compression import CHOICES, Compression
from ..errors import InputError
from ..session import is_session
from .inspect_document import prepare, run, show, write_page
from .inspect_session import inspect_session
from .options import AsJson, CompressionOptions, ModelOptions, PlotFile, choice, grouped
from .output import megabytes, note, print_json, show_measured


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
def inspect(
    *,
    documents: Annotated[
        list[str], typer.Argument(help='A document, or "-"; several with --twins. Or a session, to see what is in it.')
    ],
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
    plot: PlotFile = None,
    json: AsJson = False,
    keep: PolicyOptions,
    model: ModelOptions,
) -> None:
    """Show what policies keep of a document, head by head, which tokens have twins, and what the repair swaps.

    Without -o a table goes to standard output. With it, one HTML file that needs nothing else, not even a network.
    Nothing is evicted. Of a session file that `compress` or `/save` wrote it shows what is inside, and loads no model.
    """
    if any(is_session(document) for document in documents):
        if len(documents) > 1 or twins or output is not None or question is not None:
            raise InputError("a session is inspected alone: leave out the other documents, -o, -q and --twins")
        inspect_session(Path(documents[0]), json=json)
        return
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
    from ..inspect.prevalence import plot as draw
    from .inspect_twins import measure

    result = measure(documents, keep.settings()[0], model, sweep=sweep)
    show_measured(result, markdown(result), json=json, plot=plot, draw=draw)
