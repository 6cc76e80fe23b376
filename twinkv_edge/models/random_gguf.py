"""Models of true shapes with random weights: for footprint and speed without the weights people download."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError
from .embedded import cache_dir
from .ggml_types import GgmlType, row_bytes
from .gguf_header import read_header
from .random_blocks import QUANTS, Array, ggml_type, random_chunks
from .shapes import Part, Shape, shape_of
from .vocabulary import vocabulary

if TYPE_CHECKING:
    from gguf import GGUFWriter

_ALIGNMENT = 32  # general.alignment, the format's default
_FTYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "bf16": 32}  # LLAMA_FTYPE_MOSTLY_*

Progress = Callable[[int, int], None]


def random_model(
    like: str = "smollm2-135m",
    layers: int | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    quant: str = "q4_0",
    n_ctx_train: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Path:
    """Write a GGUF with random weights and the exact shape of a known model; return its path.

    like      "qwen3-4b", "llama-3.2-1b", "smollm2-135m", or a tiny shape for tests (`shapes.SHAPES`)
    layers    number of layers instead of the model's own
    path      where to write; None: in the cache directory, where a complete file from before is used again
    quant     type of the matrices: f32, f16, bf16, q8_0, q4_0, q4_1. With a quantized type the embedding (the
              output) is q6_K, or q8_0 where its rows are not whole blocks of 256, as llama.cpp's own
              quantization does, so that the bytes of the weights are those of the real file
    n_ctx_train  trained length in tokens, instead of the model's own
    progress  called as progress(bytes_done, bytes_in_all) after every piece

    Head counts, dimensions, RoPE parameters, QK-norm, tied or untied output, vocabulary size and trained
    length are the model's own where not given. The tokenizer is the embedded SmolLM2's, padded with unused
    tokens or cut.
    The file appears under its name only when it is complete; at most some 64 MB are in memory at a time.
    Raises InputError for an unknown name or type, for a vocabulary that can't be made (`pip install
    'twinkv-edge[demo]'`), and when the file can't be written or the disk has no room for it.
    """
    shape = shape_of(like, layers, n_ctx_train)
    if quant not in QUANTS:
        raise InputError(f"quant {quant!r} is not one of {', '.join(QUANTS)}")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InputError(f"seed must be a number from 0 on, not {seed!r}")
    tensors = [(part, *ggml_type(_storage(part, quant))) for part in shape.parts()]
    sizes = [_n_bytes(part, kind) for part, _, kind in tensors]
    if path is None:
        length = "" if n_ctx_train is None else f"-{n_ctx_train}"
        out = cache_dir() / "random" / f"{like}-{shape.n_layer}x{length}-{quant}-seed{seed}.gguf"
        if _is_complete(out, [part.name for part, _, _ in tensors], sum(sizes)):
            return out
        out.parent.mkdir(parents=True, exist_ok=True)
    else:
        out = Path(path)
        if not out.parent.is_dir():
            raise InputError(f"{out.parent} is not a directory; make it first")
    total = sum(sizes)
    free = shutil.disk_usage(out.parent).free
    if total > free:
        raise InputError(f"{out.name} needs {total >> 20} MB, {out.parent} has {free >> 20} MB: give another path")
    unfinished = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    try:
        _write_head(unfinished, shape, quant, tensors, sizes)
        _write_weights(unfinished, tensors, seed, progress, total)
        os.replace(unfinished, out)
    except OSError as why:
        raise InputError(f"{out} can't be written: {why.strerror}") from why
    finally:
        unfinished.unlink(missing_ok=True)
    return out


def _storage(part: Part, quant: str) -> str:
    """The name of the type that holds this tensor."""
    if part.role not in ("matrix", "embedding"):
        return "f32"
    if part.role == "embedding" and quant.startswith("q"):
        return "q6_K" if part.shape[0] % 256 == 0 else "q8_0"
    return quant


def _n_bytes(part: Part, kind: GgmlType) -> int:
    return row_bytes(kind, part.shape[0]) * math.prod(part.shape[1:])


def _is_complete(path: Path, names: list[str], weight_bytes: int) -> bool:
    try:
        header = read_header(path)
    except InputError:
        return False
    return list(header.tensors) == names and header.weight_bytes == weight_bytes


def _write_head(
    path: Path, shape: Shape, quant: str, tensors: list[tuple[Part, int, GgmlType]], sizes: list[int]
) -> None:
    """Metadata and tensor table, by gguf-py."""
    from gguf import GGMLQuantizationType, GGUFWriter

    words = vocabulary(shape.n_vocab)
    writer = GGUFWriter(path, shape.architecture)
    writer.add_type("model")
    writer.add_name(f"{shape.title}, random weights")
    writer.add_size_label(shape.size_label)
    writer.add_description("random weights in the shape of the model, for measuring; it talks nonsense")
    writer.add_file_type(_FTYPES[quant])
    writer.add_quantization_version(2)
    for key, value in shape.metadata().items():
        _add(writer, f"{shape.architecture}.{key}", value)
    for key, value in words.rest.items():
        _add(writer, key, value)
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.types)
    writer.add_token_merges(words.merges)
    for (part, number, _), n_bytes in zip(tensors, sizes, strict=True):
        rows = part.shape[:0:-1]  # numpy's order; the row itself is counted in bytes
        row = n_bytes // math.prod(rows)
        writer.add_tensor_info(part.name, (*rows, row), np.dtype(np.uint8), n_bytes, GGMLQuantizationType(number))
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    """One metadata entry, in the type llama.cpp reads: u32, f32, bool, string or an array of i32."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _write_weights(
    path: Path,
    tensors: list[tuple[Part, int, GgmlType]],
    seed: int,
    progress: Progress | None,
    total: int,
) -> None:
    """Append the data section, a piece of a tensor at a time."""
    done = 0
    with path.open("ab") as file:
        for i, (part, _, kind) in enumerate(tensors):
            file.write(bytes(-file.tell() % _ALIGNMENT))
            # a generator per tensor: the same weights whatever stands before it in the file
            for piece in _content(part, kind, np.random.default_rng([seed, i])):
                file.write(piece.data)
                done += piece.nbytes
                if progress:
                    progress(done, total)
        file.write(bytes(-file.tell() % _ALIGNMENT))


def _content(part: Part, kind: GgmlType, rng: np.random.Generator) -> Iterator[Array]:
    """The bytes of one tensor. Matrices have the standard deviation gain / sqrt(inputs), which keeps the
    size of what passes through them."""
    n = math.prod(part.shape)
    if part.role == "given":
        yield np.asarray(part.values, "<f4").view(np.uint8)
    elif part.role == "norm":
        yield rng.uniform(0.5, 1.5, n).astype("<f4").view(np.uint8)
    elif part.role == "bias":
        yield from random_chunks(kind, n, 0.02, rng)
    else:
        yield from random_chunks(kind, n, part.gain / math.sqrt(part.shape[0]), rng)
