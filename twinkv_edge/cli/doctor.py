"""`twinkv-edge doctor`"""

from __future__ import annotations

import typer
from rich.console import Console
from rich.markup import escape

from .options import AsJson
from .output import print_json

COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}


def doctor(json: AsJson = False) -> None:
    """Look at this machine and this installation, and say what to do about what is missing.

    Leaves with exit code 1 when something will not work.
    """
    from ..doctor import examine

    console = Console(highlight=False, soft_wrap=True)
    findings = []
    for finding in examine():
        findings.append(finding)
        if not json:
            colour = COLOURS[finding.status]
            console.print(f"[{colour}]{finding.status:<8}[/] {finding.name:<18} {escape(finding.found)}")
            if finding.remedy:
                console.print(f"{'':<28}-> {escape(finding.remedy)}")
    failed = any(finding.status == "error" for finding in findings)
    if json:
        print_json({"ok": not failed, "checks": [finding.to_dict() for finding in findings]})
    if failed:
        raise typer.Exit(1)
