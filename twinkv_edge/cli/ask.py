"""`twinkv-edge ask`"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..compression import Compression
from ..errors import InputError
from .documents import read_document
from .options import AnswerOptions, AsJson, CompressionOptions, ModelOptions, grouped
from .output import megabytes, note, print_json, progress, share, stderr_console, table, times_faster
from .room import cells_for, check_model

if TYPE_CHECKING:
    from rich.table import Table

    from ..llama import CompressedLlama
    from ..models import ModelFacts
    from ..report import CompressionReport, Footprint
    from .generation import Answer
    from .prompt import Vocabulary

TIMED_TOKENS = 16
TIMING_BUDGET_S = 2.0


@grouped
def ask(
    *,
    document: Annotated[
        str | None,
        typer.Argument(help='Text, PDF or DOCX, or "-" for standard input; not with --session.', metavar="[DOC|-]"),
    ] = None,
    question: Annotated[str | None, typer.Argument(help="What to ask about it.")] = None,
    question_option: Annotated[str | None, typer.Option("--question", "-q", help="The same, as an option.")] = None,
    session: Annotated[
        Path | None,
        typer.Option(help="Ask a session that `compress` or `/save` wrote; nothing is read again.", metavar="FILE"),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Answer with the full cache as well.")] = False,
    json: AsJson = False,
    compression: CompressionOptions,
    model: ModelOptions,
    answer: AnswerOptions,
) -> None:
    """Ask a question about a document, answered from a compressed cache.

    The document is read into the KV cache, the policy and the repair choose what to keep, the rest is evicted and its
    memory given back, and the answer is decoded from what is left. The answer goes to standard output, everything
    else to standard error.

    With --session the document was compressed before, by the settings it was saved with and without knowing the
    question; only the question is read.
    """
    if session is not None:
        _ask_session(session, [t for t in (document, question, question_option) if t is not None], model, answer, json)
        return
    if document is None:
        raise InputError("give a document and a question, or --session FILE and a question")
    if (question is None) == (question_option is None):
        raise InputError("give one question: as an argument after the document, or with --question")
    text = str(question if question is not None else question_option)
    if not text.strip():
        raise InputError("the question is empty")
    job = prepare(read_document(document), text, compression.settings(), model, answer)
    for remark in job.notes:
        note(remark)
    result = run(job, model, answer, compare=compare, quiet=json)
    result["document"], result["question"] = document, text
    if json:
        print_json(result)
    else:
        show(result)


def _ask_session(path: Path, texts: list[str], model: ModelOptions, answer: AnswerOptions, as_json: bool) -> None:
    from .ask_session import ask_session

    if len(texts) != 1 or not texts[0].strip():
        raise InputError("with --session, give one question and nothing else: the document is in the session")
    ask_session(path, texts[0], model, answer, as_json=as_json)


@dataclass
class Job:
    """What is to be done, all of it checked before a model is loaded."""

    settings: Compression
    facts: ModelFacts
    vocabulary: Vocabulary
    tokens: list[int]
    n_document: int
    n_ctx: int
    notes: list[str] = field(default_factory=list)


def prepare(document: str, question: str, settings: Compression, model: ModelOptions, answer: AnswerOptions) -> Job:
    """Reads the model's facts and vocabulary, makes the prompt, and sees that everything fits.

    Raises:
        InputError: Something does not, or is out of range.
        UnsupportedModelError: The model keeps no cache that can be rewritten.
    """
    from .prompt import ChatPrompt, Vocabulary, question_about, tail_length

    answer.check()
    facts = check_model(model, settings.layout)
    vocabulary = Vocabulary.load(facts.path)
    prompt = ChatPrompt(vocabulary)
    tokens = prompt.begin([question_about(document, question)])
    tail = tail_length(prompt, document, tokens)
    notes = [] if prompt.has_template else ["the model has no chat template: it gets the plain text"]
    if tail > settings.n_recent:
        notes.append(f"n_recent raised from {settings.n_recent} to {tail}, to cover the question and the template")
        settings = settings.with_(n_recent=tail)
    settings.budget(len(tokens) - 1)  # raises when it is too small
    n_document = len(vocabulary.tokenize(document, special=False))
    n_more = max(answer.max_tokens, TIMED_TOKENS + 1)
    n_ctx = cells_for(facts, settings, model, len(tokens), n_document, n_more)
    return Job(settings, facts, vocabulary, tokens, n_document, n_ctx, notes)


def run(job: Job, model: ModelOptions, options: AnswerOptions, *, compare: bool, quiet: bool) -> dict[str, Any]:
    """Does it. `quiet`: nothing is written to standard output."""
    from ..bench.clock import rewind
    from ..pipeline import carry_out, make_plan
    from .generation import load, prefill

    began = time.perf_counter()
    llm = load(model, job.n_ctx, job.settings, seed=options.seed)
    try:
        seconds = {"load": time.perf_counter() - began}
        n = len(job.tokens) - 1
        with progress("reading", n, "tokens") as done:
            began = time.perf_counter()
            peak = prefill(llm, job.tokens, done)
            seconds["prefill"] = time.perf_counter() - began
        before = llm.footprint()
        with progress("choosing", llm.kv.n_layers, "layers") as done:
            began = time.perf_counter()
            plan = make_plan(llm.kv, job.settings, llm.tau, lambda layer, _: done(layer))
            seconds["compress"] = time.perf_counter() - began
        # after the choice: whatever is decoded from here on and taken back cannot touch it
        before_ms = _timed(llm)
        full = None
        if compare:
            full = _say(llm, job, options, "full cache", quiet=quiet)
            rewind(llm, n)
        began = time.perf_counter()
        report = carry_out(llm.kv, plan, job.settings, llm.tau)
        seconds["compress"] += time.perf_counter() - began
        after = llm.footprint()
        said = _say(llm, job, options, "compressed" if compare else "", quiet=quiet)
        seconds["answer"] = said.seconds
        after_ms = _timed(llm)
        n_threads = llm.n_threads
    finally:
        llm.close()
    result = _result(job, report, (before, after), (before_ms, after_ms), (said, full), seconds, n_threads)
    result["cache"]["peak_cells"] = peak
    return result


def _timed(llm: CompressedLlama) -> list[float]:
    """Decodes a few tokens and takes them back; as many as there is room for."""
    from ..bench.clock import decode_ms

    room = min(llm.kv.n_cells_allocated - llm.kv.n_cells, llm.n_ctx_train - llm.n_tokens) - 1
    return decode_ms(llm, min(TIMED_TOKENS, room), budget_s=TIMING_BUDGET_S) if room > 0 else []


def _say(llm: CompressedLlama, job: Job, options: AnswerOptions, label: str, *, quiet: bool) -> Answer:
    from .generation import Answer, stream

    answer = Answer()
    if label and not quiet:
        sys.stdout.write(f"{label + ':':<12} ")
        sys.stdout.flush()
    for piece in stream(llm, job.vocabulary, job.tokens, options, answer):
        if not quiet:
            sys.stdout.write(piece)
            sys.stdout.flush()
    if not quiet:
        sys.stdout.write("\n")
        sys.stdout.flush()
    return answer


def _result(
    job: Job,
    report: CompressionReport,
    footprints: tuple[Footprint, Footprint],
    ms: tuple[list[float], list[float]],
    answers: tuple[Answer, Answer | None],
    seconds: dict[str, float],
    threads: int,
) -> dict[str, Any]:
    """Everything there is to say, as the JSON has it."""
    from ..bench.clock import median

    answer, full = answers
    given = job.settings.tau is not None
    return {
        "answer": answer.text,
        "finish_reason": answer.finish_reason,
        "full_cache_answer": full.text if full else None,
        "model": {"name": job.facts.name, "path": str(job.facts.path)},
        "tokens": {"document": job.n_document, "prompt": len(job.tokens), "answer": len(answer.tokens)},
        "settings": asdict(job.settings),
        "tau": {
            "value": report.tau,
            "origin": "given" if given else "model default",
            "has_qk_norm": job.facts.has_qk_norm,
        },
        "compression": report.to_dict(),
        "cache": {"n_ctx": job.n_ctx, "before": footprints[0].to_dict(), "after": footprints[1].to_dict()},
        "decode_ms": {
            "before": median(ms[0]),
            "after": median(ms[1]),
            "timed_tokens": [len(ms[0]), len(ms[1])],
            "threads": threads,
        },
        "seconds": seconds,
        "notes": job.notes,
    }


def show(result: dict[str, Any]) -> None:
    """The table and the lines below it, on stderr."""
    decode, done, seconds = result["decode_ms"], result["compression"], result["seconds"]
    console = stderr_console()
    console.print()
    console.print(_before_and_after(result))
    if done["policy"] == "none":
        line = "policy none: nothing was evicted"
    else:
        line = f"policy {done['policy']}, {done['layout']} layout, " + _repair_line(result)
    console.print(line, soft_wrap=True)
    if done["n_before"] < done["n_tokens"]:  # some was evicted while reading
        console.print(
            f"evicted while reading: of {done['n_tokens']:,} tokens, never more than {result['cache']['peak_cells']:,} "
            "were in the cache",
            soft_wrap=True,
        )
    stages = ", ".join(f"{name} {1e3 * s:.0f} ms" for name, s in done["seconds"].items())
    console.print(
        f"seconds: load {seconds['load']:.1f}, prefill {seconds['prefill']:.1f}, compress {seconds['compress']:.1f} "
        f"({stages}), answer {seconds['answer']:.1f}",
        soft_wrap=True,
    )
    if decode["before"] and decode["after"]:
        timed = " and ".join(str(n) for n in decode["timed_tokens"])
        console.print(
            f"decode: medians of {timed} tokens, decoded for the clock and taken back; {decode['threads']} threads",
            soft_wrap=True,
        )
    if result["finish_reason"] in ("length", "context"):
        end = {"length": "at --max-tokens", "context": "because the cache, or the trained length, was full"}
        note(f"the answer stopped {end[result['finish_reason']]}")


def _before_and_after(result: dict[str, Any]) -> Table:
    before, after, decode = result["cache"]["before"], result["cache"]["after"], result["decode_ms"]
    rows = [("cells per head", f"{before['cells']:,}", f"{after['cells']:,}", share(after["cells"], before["cells"]))]
    for name, key in (("cache in use, MB", "bytes_used"), ("cache in memory, MB", "bytes_resident")):
        rows.append((name, megabytes(before[key]), megabytes(after[key]), share(after[key], before[key])))
    if decode["before"] and decode["after"]:
        faster = times_faster(decode["before"], decode["after"])
        rows.append(("decode, ms/token", f"{decode['before']:.1f}", f"{decode['after']:.1f}", f"{faster} as fast"))
    return table(("", "before", "after", ""), rows)


def _repair_line(result: dict[str, Any]) -> str:
    done, tau = result["compression"], result["tau"]
    if done["repair"] == "none":
        return "no repair"
    origin = (
        "given" if tau["origin"] == "given" else "the default with QK-norm" if tau["has_qk_norm"] else "the default"
    )
    backend = f", {done['backend']} kernels" if done["backend"] else ""
    if done["repair"] == "coverage":  # goes by no threshold
        return f"coverage repair: {done['swaps']:,} swaps{backend}"
    return f"{done['repair']} repair: {done['swaps']:,} swaps at tau {tau['value']:.2f} ({origin}){backend}"
