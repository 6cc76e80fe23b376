"""Small GGUF files byte by byte: broken ones, and architectures nobody here has weights for."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

Tensors = dict[str, tuple[tuple[int, ...], int]]  # name -> shape in ggml's order, ggml type

_F32 = 0


def text(s: str | bytes) -> bytes:
    raw = s.encode() if isinstance(s, str) else s
    return struct.pack("<Q", len(raw)) + raw


def value(v: Any) -> bytes:
    """A metadata value with its type in front."""
    if isinstance(v, bool):
        return struct.pack("<I?", 7, v)
    if isinstance(v, int):
        return struct.pack("<II", 4, v) if 0 <= v < 1 << 32 else struct.pack("<Iq", 11, v)
    if isinstance(v, float):
        return struct.pack("<If", 6, v)
    if isinstance(v, str):
        return struct.pack("<I", 8) + text(v)
    if all(isinstance(x, str) for x in v):
        return struct.pack("<IIQ", 9, 8, len(v)) + b"".join(map(text, v))
    if all(isinstance(x, bool) for x in v):
        return struct.pack("<IIQ", 9, 7, len(v)) + bytes(v)
    return struct.pack("<IIQ", 9, 5, len(v)) + struct.pack(f"<{len(v)}i", *v)


def gguf(metadata: dict[str, Any], tensors: Tensors | None = None, *, version: int = 3) -> bytes:
    """A whole file; the data of f32 tensors is zeros."""
    tensors = tensors or {}
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, v in metadata.items():
        out += text(key) + value(v)
    offset = 0
    for name, (shape, kind) in tensors.items():
        out += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        out += struct.pack("<IQ", kind, offset)
        size = 4
        for n in shape:
            size *= n
        offset += -(-size // 32) * 32
    return out + bytes(-len(out) % 32) + bytes(offset)


def decoder(architecture: str = "llama", n_layer: int = 2, **changes: Any) -> dict[str, Any]:
    """Metadata of a small decoder; `changes` by key without architecture, `.` as `__`; None removes a key."""
    keys: dict[str, Any] = {
        "context_length": 4096,
        "embedding_length": 256,
        "block_count": n_layer,
        "feed_forward_length": 512,
        "attention__head_count": 4,
        "attention__head_count_kv": 2,
    } | changes
    metadata = {"general.architecture": architecture, "general.name": "test"}
    for key, v in keys.items():
        if v is not None:
            metadata[f"{architecture}.{key.replace('__', '.')}"] = v
    return metadata


def write(path: Path, metadata: dict[str, Any], tensors: Tensors | None = None) -> Path:
    path.write_bytes(gguf(metadata, tensors if tensors is not None else {"a.weight": ((32, 2), _F32)}))
    return path
