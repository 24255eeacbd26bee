"""What stands before the bytes of a tensor in a file, by the ending of its name.

The formats are numpy's (numpy.lib.format, version 1.0) and that of safetensors
(github.com/huggingface/safetensors). They do not depend on either package.
"""

from __future__ import annotations

import json
import os

from ._tensor import NAMES, size_of

_NPY = {
    "bool": "|b1", "int8": "|i1", "int16": "<i2", "int32": "<i4", "int64": "<i8", "uint8": "|u1", "uint16": "<u2",
    "uint32": "<u4", "uint64": "<u8", "float16": "<f2", "float32": "<f4", "float64": "<f8", "complex64": "<c8",
    "complex128": "<c16",
}  # fmt: skip
_SAFETENSORS = {
    "bool": "BOOL", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "uint8": "U8", "uint16": "U16",
    "uint32": "U32", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
}  # fmt: skip


def header(path: str | os.PathLike[str], name: str, dtype: int, shape: tuple[int, ...]) -> bytes:
    """Return the header of a file of one tensor; nothing if the ending says that it has raw bytes."""
    ending, kind = os.path.splitext(os.fspath(path))[1], NAMES[dtype]
    if ending == ".npy":
        if kind not in _NPY:
            raise ValueError(f"{name!r}: a .npy file has no {kind}; use .safetensors")
        text = f"{{'descr': '{_NPY[kind]}', 'fortran_order': False, 'shape': {shape!r}, }}"
        text += " " * (-(10 + len(text) + 1) % 64) + "\n"
        return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()
    if ending == ".safetensors":
        if name == "__metadata__":
            raise ValueError(f"{name!r} is where a .safetensors file has its metadata; use .npy")
        if kind not in _SAFETENSORS:
            raise ValueError(f"{name!r}: a .safetensors file has no {kind}; use .npy")
        entry = {"dtype": _SAFETENSORS[kind], "shape": shape, "data_offsets": [0, size_of(dtype, shape)]}
        raw = json.dumps({name: entry}, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        return len(raw).to_bytes(8, "little") + raw
    return b""
