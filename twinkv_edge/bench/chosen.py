"""Which policies a benchmark can run on a model: some need a file of the user's."""

from __future__ import annotations

from collections.abc import Sequence

from .. import pipeline, policies
from ..compression import Compression
from ..errors import InputError
from ..llama import CompressedLlama


def usable(llm: CompressedLlama, names: Sequence[str] | None) -> tuple[list[str], dict[str, str]]:
    """Policies to measure, and why the others are left out.

    Args:
        names: Those asked for; None: all that evict.

    Raises:
        InputError: One that was asked for by name is unknown, or cannot be made for this model.
    """
    if names is not None:
        for name in names:
            pipeline.make_policy(Compression(policy=name), llm.tau, llm.facts.path)
        return list(names), {}
    chosen, left_out = [], {}
    for name in policies.names():
        if name == "none":
            continue
        try:
            pipeline.make_policy(Compression(policy=name), llm.tau, llm.facts.path)
            chosen.append(name)
        except InputError as why:
            left_out[name] = str(why)
    return chosen, left_out
