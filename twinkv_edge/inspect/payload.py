"""What the page gets: one JSON object, the big arrays in it deflated and in base64."""

from __future__ import annotations

import base64
import codecs
import zlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .gather import Inspection, PolicyResult

STEPS = 200  # similarities are stored in steps of 1/200, rounded down: what is below tau stays below it
NONE = 255  # no token to compare with


class Pieces(Protocol):
    """What is needed of a vocabulary."""

    def piece(self, token: int) -> bytes: ...
    def is_control(self, token: int) -> bool: ...
    def text(self, token: int) -> str: ...


def pieces(vocabulary: Pieces, tokens: Sequence[int]) -> tuple[list[str], list[int]]:
    """The text of each token, and which of them are control tokens, shown by name.

    A character whose bytes are spread over several tokens belongs to the last of them; the others have no text.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    out: list[str] = []
    control: list[int] = []
    for index, token in enumerate(tokens):
        if vocabulary.is_control(token):
            _append_to_last(out, decoder.decode(b"", final=True))
            decoder.reset()
            control.append(index)
            out.append(vocabulary.text(token))
        else:
            out.append(decoder.decode(vocabulary.piece(token)))
    _append_to_last(out, decoder.decode(b"", final=True))
    return out, control


def _append_to_last(out: list[str], text: str) -> None:
    if out and text:
        out[-1] += text


def pack(array: npt.NDArray[Any]) -> str:
    """The array's bytes, little endian, deflated, base64."""
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return base64.b64encode(zlib.compress(np.ascontiguousarray(little).tobytes(), 6)).decode("ascii")


def quantized(similarity: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Similarities in steps of 1/STEPS, rounded down, as uint8; negative ones are 0, and -1, nothing there, is NONE."""
    # a hundredth of a step keeps 0.9 as a float32, which is a little less, from falling to the step below
    steps = np.floor(np.clip(similarity, 0, 1) * np.float32(STEPS) + np.float32(0.001))
    return np.where(similarity == -1, NONE, steps).astype(np.uint8)


def payload(
    found: Inspection, texts: Sequence[str], control: Sequence[int], tokens: Sequence[int], about: dict[str, Any]
) -> dict[str, Any]:
    """Everything the page shows. `about`: what the heading says, text to text."""
    n = found.counts.shape[-1]
    small: type[np.uint16] | type[np.uint32] = np.uint16 if n <= np.iinfo(np.uint16).max else np.uint32
    return {
        "about": about,
        "summary": found.summary(),
        "texts": list(texts),
        "ids": list(tokens),
        "control": list(control),
        "steps": STEPS,
        "most": found.most,
        "wide": np.dtype(small).itemsize * 8,
        "protected": [found.policies[0].settings.n_sink, n - found.policies[0].settings.n_recent],
        "counts": pack(found.counts.astype(small)),
        "twin_tokens": pack(np.concatenate([x.tokens for x in found.lists]).astype(small)),
        "twin_similarities": pack(quantized(np.concatenate([x.similarities for x in found.lists]))),
        "policies": [_policy(p) for p in found.policies],
    }


def _policy(p: PolicyResult) -> dict[str, str]:
    return {"label": p.label, "roles": pack(p.roles), "best": pack(quantized(p.best))}
