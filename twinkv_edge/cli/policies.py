"""`twinkv-edge policies`"""

from __future__ import annotations

from ..errors import InputError
from .options import AsJson
from .output import print_json


def policies(json: AsJson = False) -> None:
    """List the eviction policies, those of installed third-party packages too."""
    from .. import policies as registry

    try:
        found = registry.available()
    except Exception as e:  # whatever a third party's module raises when it is imported
        raise InputError(f"a third-party policy cannot be loaded: {type(e).__name__}: {e}") from e
    own = registry.__name__.partition(".")[0] + "."
    rows = [
        {
            "name": name,
            "summary": str(getattr(cls, "summary", "")),
            "third_party": not cls.__module__.startswith(own),
            "module": cls.__module__,
        }
        for name, cls in found.items()
    ]
    if json:
        print_json({"policies": rows})
        return
    width = max(map(len, found))
    for row in rows:
        origin = f" (third party: {row['module']})" if row["third_party"] else ""
        print(f"{row['name']:<{width}} {row['summary']}{origin}")
