"""Prints a requirement of pyproject.toml by name, or all build requirements: versions are stated once, there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
if sys.argv[1] == "--build":
    table = text[text.index("requires = [") : text.index("build-backend")]
    print("\n".join(re.findall(r'"([^"\n]+)"', table)))
else:
    name = re.escape(sys.argv[1])
    found = re.search(rf'"({name}[<>=~!][^"\n]*)"', text)
    if found is None:
        sys.exit(f"pyproject.toml requires no {sys.argv[1]}")
    print(found.group(1))
