"""The commands of a chat: lines that begin with a slash."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from . import saved
from .chat_terminal import stoppable
from .documents import read_document
from .output import megabytes, note, print_json, progress

if TYPE_CHECKING:
    from ..report import CompressionReport
    from .chat_session import ChatSession

HELP = {
    "/add": ("FILE", "read a document: text, Markdown, source, PDF, DOCX; the next message is about it"),
    "/compress": ("[RATIO]", "evict from the cache now; RATIO is the fraction to remove"),
    "/stats": ("", "tokens, cells, memory, speed, and what was evicted"),
    "/save": ("FILE", "save the conversation and its cache"),
    "/load": ("FILE", "go on with a saved conversation instead of this one"),
    "/undo": ("", "take back the last turn"),
    "/help": ("", "this"),
    "/quit": ("", "leave; so does Ctrl-D. Ctrl-C stops an answer."),
}


def help_text() -> str:
    return "\n".join(f"{f'{name} {arguments}'.strip():<18} {what}" for name, (arguments, what) in HELP.items())


class Commands:
    """Carries commands out, and says what came of it: on standard output, or as one JSON object."""

    def __init__(self, session: ChatSession, *, documents: list[str], as_json: bool) -> None:
        self.session, self.documents, self.as_json = session, documents, as_json

    def run(self, line: str) -> None:
        """Raises InputError for a command that does not exist or lacks something; TwinKVError for one that fails."""
        name, _, rest = line.partition(" ")
        argument = rest.strip()
        if name not in HELP or name == "/quit":
            raise InputError(f"there is no command {line!r}: /help lists them")
        wanted = HELP[name][0]
        if bool(argument) and not wanted:
            raise InputError(f"there is no command {line!r}: {name} takes nothing after it")
        if wanted and not wanted.startswith("[") and not argument:
            raise InputError(f"{name} needs a {wanted.lower()}: {name} {wanted}")
        action: Callable[[str], tuple[dict[str, Any], str]] = getattr(self, "_" + name[1:])
        facts, text = action(argument)
        if self.as_json:
            print_json({"command": name[1:], **facts})
        else:
            print(text, flush=True)

    def _help(self, _: str) -> tuple[dict[str, Any], str]:
        return {"text": help_text()}, help_text()

    def _add(self, path: str) -> tuple[dict[str, Any], str]:
        return self.add(path)

    def add(self, path: str) -> tuple[dict[str, Any], str]:
        """Reads a document into the cache; Ctrl-C stops the reading."""
        from .generation import Interrupted

        text, name = read_document(path), Path(path).name
        with stoppable() as stopped, progress("reading", self.session.count(text), "tokens") as done:
            try:
                n = self.session.add(text, done, stopped)
            except Interrupted:
                raise InputError(f"stopped; {name} was not added") from None
        self.documents.append(name)
        free = self.session.llm.kv.n_cells_allocated - self.session.llm.kv.n_cells
        return {"document": name, "tokens": n}, f"{name}: {n:,} tokens read; room for {free:,} more"

    def _compress(self, argument: str) -> tuple[dict[str, Any], str]:
        if len(argument.split()) > 1:
            raise InputError("/compress takes one ratio, or nothing")
        try:
            ratio = float(argument) if argument else None
        except ValueError:
            raise InputError(f"{argument!r} is no ratio: give a number, 0 or more and below 1") from None
        with progress("compressing", self.session.llm.kv.n_layers, "layers") as done:
            report = self.session.compress(ratio, done)
        return report.to_dict(), compression_line(report)

    def _stats(self, _: str) -> tuple[dict[str, Any], str]:
        stats = self.session.stats()
        lines = [
            f"turns: {stats['turns']}; tokens: {stats['tokens']:,}, {stats['evicted']:,} of them evicted",
            f"{stats['cells']:,} of {stats['cells_allocated']:,} cells in use, {megabytes(stats['bytes_used'])} MB; "
            f"{megabytes(stats['bytes_resident'])} MB of the cache in memory",
        ]
        if stats["evicted"]:
            tenths = " ".join(f"{100 * share:.0f}" for share in stats["kept_by_tenth"])
            lines.append(f"kept of each tenth of the conversation, %: {tenths}")
        if stats["ms_per_token"] is not None:
            lines.append(f"last answer: {stats['ms_per_token']:.1f} ms/token")
        if self.session.last is not None:
            lines.append("last compression: " + compression_line(self.session.last))
        return stats, "\n".join(lines)

    def _save(self, path: str) -> tuple[dict[str, Any], str]:
        session = saved.save(self.session, path, documents=self.documents)
        facts = saved.facts_of(session)
        return facts, f"saved {session.path}: {facts['cells']:,} cells, {megabytes(facts['bytes'])} MB"

    def _load(self, path: str) -> tuple[dict[str, Any], str]:
        session = saved.restore(self.session, path)
        self.documents[:] = saved.document_names(session.contents)
        facts = saved.facts_of(session)
        ours, theirs = self.session.llm.compression, session.contents.compression
        if ours != theirs:
            note(f"/compress goes by this chat's settings (policy {ours.policy}), not the file's ({theirs.policy})")
        return facts, (
            f"loaded {session.path}: {self.session.turns} turns, {facts['tokens']:,} tokens in {facts['cells']:,} cells"
        )

    def _undo(self, _: str) -> tuple[dict[str, Any], str]:
        what = self.session.undo()
        if what == "document" and self.documents:
            self.documents.pop()
        return {"undone": what, "turn": self.session.turns}, f"took the last {what} back"


def compression_line(report: CompressionReport) -> str:
    repaired = f", {report.swaps:,} swaps" if report.repair != "none" else ""
    return (
        f"{report.n_before:,} -> {report.n_after:,} cells, {megabytes(report.resident_before)} -> "
        f"{megabytes(report.resident_after)} MB in memory ({report.policy}, repair {report.repair}{repaired}, "
        f"{report.total_seconds:.1f} s)"
    )
