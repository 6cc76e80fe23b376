"""Sizes of ggml's tensor types: a block of some number of elements takes some number of bytes.

The table is ggml's own (`ggml_blck_size`, `ggml_type_size`; tests compare it with the loaded library). It is
written out because reading a model's facts must not cost the import of a library.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from ..errors import InputError


class GgmlType(NamedTuple):
    """A tensor type: `block` elements are stored in `size` bytes."""

    name: str
    block: int
    size: int


GGML_TYPES: Final[dict[int, GgmlType]] = {
    0: GgmlType("f32", 1, 4),
    1: GgmlType("f16", 1, 2),
    2: GgmlType("q4_0", 32, 18),
    3: GgmlType("q4_1", 32, 20),
    6: GgmlType("q5_0", 32, 22),
    7: GgmlType("q5_1", 32, 24),
    8: GgmlType("q8_0", 32, 34),
    9: GgmlType("q8_1", 32, 36),
    10: GgmlType("q2_K", 256, 84),
    11: GgmlType("q3_K", 256, 110),
    12: GgmlType("q4_K", 256, 144),
    13: GgmlType("q5_K", 256, 176),
    14: GgmlType("q6_K", 256, 210),
    15: GgmlType("q8_K", 256, 292),
    16: GgmlType("iq2_xxs", 256, 66),
    17: GgmlType("iq2_xs", 256, 74),
    18: GgmlType("iq3_xxs", 256, 98),
    19: GgmlType("iq1_s", 256, 50),
    20: GgmlType("iq4_nl", 32, 18),
    21: GgmlType("iq3_s", 256, 110),
    22: GgmlType("iq2_s", 256, 82),
    23: GgmlType("iq4_xs", 256, 136),
    24: GgmlType("i8", 1, 1),
    25: GgmlType("i16", 1, 2),
    26: GgmlType("i32", 1, 4),
    27: GgmlType("i64", 1, 8),
    28: GgmlType("f64", 1, 8),
    29: GgmlType("iq1_m", 256, 56),
    30: GgmlType("bf16", 1, 2),
    34: GgmlType("tq1_0", 256, 54),
    35: GgmlType("tq2_0", 256, 66),
    39: GgmlType("mxfp4", 32, 17),
    40: GgmlType("nvfp4", 64, 36),
    41: GgmlType("q1_0", 128, 18),
    42: GgmlType("q2_0", 64, 18),
}

#: types llama.cpp accepts for a KV cache, by the names its own command line uses
CACHE_TYPES: Final[dict[str, int]] = {
    "f32": 0,
    "f16": 1,
    "bf16": 30,
    "q8_0": 8,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "iq4_nl": 20,
}


def cache_type(name: str | int) -> GgmlType:
    """The type of a KV cache, by name (any case) or by ggml's number.

    Raises InputError for a type llama.cpp does not take for a cache.
    """
    number = CACHE_TYPES.get(name.lower(), -1) if isinstance(name, str) else name
    if number not in CACHE_TYPES.values():
        raise InputError(f"cache type {name!r} is not one of {', '.join(CACHE_TYPES)}")
    return GGML_TYPES[number]


def row_bytes(kind: GgmlType, n_elements: int) -> int:
    """Bytes of one row of `n_elements`; InputError if the row is not a whole number of blocks."""
    if n_elements % kind.block:
        raise InputError(
            f"a row of {n_elements} elements is not a multiple of {kind.name}'s block of {kind.block}; "
            "use f16, bf16 or f32"
        )
    return n_elements // kind.block * kind.size
