"""Packs and unpacks the messages of docs/link.md, and keeps nothing.

encode and decode know every kind, from a table. Kinds that a small call needs have
functions of their own besides, which cost less. A message that breaks a rule of the
page raises WireError; who gets one ends the link.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Union

Buffer = Union[bytes, bytearray, memoryview]

LINK = 1  # the protocol's version
PACKET_BYTES = 64 << 10
PIECE_BYTES = 1 << 20  # the most bytes of a chunk; a piece that is not the last has as many, or is made bit by bit
PIECES_AT_A_TIME = 8  # of an input, on their way
CHUNKS = 1 << 20  # the most of a tensor
GIVES = 1024  # ranges of one give

HELLO, MEMORY, FORGET, TAKE, GIVE, DONE = 1, 2, 3, 4, 5, 8
ASK, CALL, DATA, CANCEL, RESULT, REGION = 10, 11, 12, 13, 14, 15
READY, RUN, ANSWER, END, GONE, KEPT = 20, 21, 22, 23, 24, 25

LONG, REGIONS, PIECE, IDEMPOTENT, ONLY = 1, 2, 4, 8, 16  # flags
PIECES, WHOLE = 0, 1  # how an input or a result travels

HEAD = struct.Struct("<BBHIQ")
RANGE = struct.Struct("<IQQ")
_DONE = struct.Struct("<H7QH")
_REGION = struct.Struct("<IQQIQQ")
_DATA = struct.Struct("<BBHIQIIQQ")
_TAKE = struct.Struct("<BBHIQQI")
_CALL = struct.Struct("<BBHIQII")
_ANSWER = struct.Struct("<BBHIQHQH")
_U16 = struct.Struct("<H")
_NAMED = struct.Struct("<IH")
_NUMBERS = {name: struct.Struct("<" + code) for name, code in (("u8", "B"), ("u16", "H"), ("u32", "I"), ("u64", "Q"))}


class WireError(ValueError):
    """A message breaks a rule of docs/link.md."""


class Extent(NamedTuple):
    """A range as messages name it. The memory is 0 where there is none."""

    memory: int
    offset: int
    length: int


NOWHERE = Extent(0, 0, 0)

# What the body of each kind has: pairs of field and element. "tensor" is the fields
# dtype and shape; a list of pairs is a u16 count and as many entries.
_PLACED = (("", "tensor"), ("range", "range"))
_INPUT = (
    ("port", "text"), ("", "tensor"), ("name", "text"), ("metadata", "texts"), ("how", "u8"), ("range", "range"),
)  # fmt: skip
_SINK = (("port", "text"), ("how", "u8"), ("range", "range"))
_RESULT = (("result", "u32"), ("name", "text"), ("", "tensor"), ("how", "u8"), ("range", "range"))
_BODIES: dict[int, tuple[tuple[str, Any], ...]] = {
    HELLO: (("json", "json"),),
    MEMORY: (("bytes", "u64"),),
    FORGET: (),
    TAKE: (("bytes", "u64"), ("millis", "u32")),
    GIVE: (("ranges", "ranges"),),
    DONE: (("code", "u16"), ("timings", "timings"), ("results", _RESULT), ("json", "json")),
    ASK: (("millis", "u32"), ("json", "json")),
    CALL: (
        ("connection", "u32"), ("millis", "u32"), ("model", "text"), ("params", "texts"),
        ("inputs", _INPUT), ("sinks", _SINK),
    ),
    DATA: (("input", "u32"), ("range", "range")),
    CANCEL: (),
    RESULT: _RESULT,
    REGION: (("result", "u32"), ("offset", "u64"), ("length", "u64"), ("range", "range")),
    READY: (("json", "json"),),
    RUN: (("run", "u64"), ("row", "u64"), ("rows", "u64"), ("model", "u16"), ("inputs", _PLACED), ("json", "json")),
    ANSWER: (("code", "u16"), ("nanos", "u64"), ("outputs", _PLACED), ("json", "json")),
    END: (),
    GONE: (),
    KEPT: (("json", "json"),),
}  # fmt: skip


def encode(kind: int, id: int = 0, flags: int = 0, **fields: Any) -> bytes:
    """Return the packet of a message. Its json is bytes; absent fields are zero or empty."""
    out = bytearray(16)
    _write(out, _BODIES[kind], fields)
    if len(out) > PACKET_BYTES:
        raise WireError(f"a message of {len(out)} bytes; at most {PACKET_BYTES} fit into a packet")
    HEAD.pack_into(out, 0, kind, flags, 0, len(out), id)
    return bytes(out)


def decode(packet: Buffer) -> dict[str, Any]:
    """Return the fields of a packet, with kind, flags and id. Its json is bytes."""
    kind, flags, id = head(packet, len(packet))
    fields: dict[str, Any] = {"kind": kind, "flags": flags, "id": id}
    try:
        at = _read(memoryview(packet), 16, _BODIES[kind], fields)
    except (struct.error, UnicodeDecodeError) as err:
        raise WireError(f"a message of kind {kind}: {err}") from None
    if at != len(packet):
        raise WireError(f"a message of kind {kind} has {len(packet) - at} bytes too many")
    if flags & LONG and "json" in fields and len(fields["json"]) != RANGE.size:
        raise WireError("long json is not a range")
    return fields


def head(packet: Buffer, size: int) -> tuple[int, int, int]:
    """Return kind, flags and id of a packet of size bytes."""
    if size < 16:
        raise WireError(f"a packet of {size} bytes has no head")
    kind, flags, zero, length, id = HEAD.unpack_from(packet)
    if length != size or zero or kind not in _BODIES:
        raise WireError(f"a packet of {size} bytes says kind {kind}, {length} bytes")
    return kind, flags, id


def text(value: str) -> bytes:
    """Return a text as it stands in a message."""
    raw = encoded(value)
    if len(raw) > 0xFFFF:
        raise ValueError(f"a text of {len(raw)} bytes; at most 65535 fit")
    return _U16.pack(len(raw)) + raw


def texts(pairs: Iterable[tuple[str, str]]) -> bytes:
    """Return pairs of texts as they stand in a message."""
    all = [text(k) + text(v) for k, v in pairs]
    return _U16.pack(len(all)) + b"".join(all)


def tensor(dtype: int, shape: Sequence[int]) -> bytes:
    """Return the description of a tensor as it stands in a message."""
    return struct.pack(f"<BB{len(shape)}Q", dtype, len(shape), *shape)


def pack_call(id: int, flags: int, connection: int, millis: int, body: bytes) -> bytes:
    """Return a call whose body, from the model on, is packed already."""
    size = 24 + len(body)
    if size > PACKET_BYTES:
        raise ValueError(f"the names, params and metadata of a call have {size} bytes; at most {PACKET_BYTES} fit")
    return _CALL.pack(CALL, flags, 0, size, id, connection, millis) + body


def pack_data(id: int, input: int, memory: int, offset: int, length: int) -> bytes:
    """Return a data."""
    return _DATA.pack(DATA, 0, 0, 40, id, input, memory, offset, length)


def pack_take(id: int, bytes: int, millis: int) -> bytes:
    """Return a take."""
    return _TAKE.pack(TAKE, 0, 0, 28, id, bytes, millis)


def pack_give(ranges: Sequence[tuple[int, int, int]]) -> bytes:
    """Return a give of at most GIVES ranges."""
    body = b"".join([RANGE.pack(*r) for r in ranges])
    return HEAD.pack(GIVE, 0, 0, 18 + len(body), 0) + _U16.pack(len(ranges)) + body


def pack_cancel(id: int) -> bytes:
    """Return a cancel."""
    return HEAD.pack(CANCEL, 0, 0, 16, id)


Placed = tuple[int, tuple[int, ...], Extent]  # data type, shape and range of an output


def pack_answer(id: int, code: int, nanos: int, outputs: Sequence[Placed], json: bytes) -> bytes:
    """Return an answer."""
    body = b"".join([tensor(dtype, shape) + RANGE.pack(*place) for dtype, shape, place in outputs]) + json
    size = _ANSWER.size + len(body)
    if size > PACKET_BYTES:
        raise WireError(f"an answer of {size} bytes; at most {PACKET_BYTES} fit into a packet")
    return _ANSWER.pack(ANSWER, 0, 0, size, id, code, nanos, len(outputs)) + body


Announced = tuple[int, str, int, tuple[int, ...], int, Extent]


def unpack_done(packet: Buffer, size: int) -> tuple[int, tuple[int, ...], list[Announced], bytes]:
    """Return code, timings, results and json of a done."""
    if size < 76:
        raise WireError("a done ends too early")
    said = _DONE.unpack_from(packet, 16)
    at, results = 76, []
    for _ in range(said[8]):
        result, at = _announced(packet, at)
        results.append(result)
    if at > size:
        raise WireError("a done ends too early")
    return said[0], said[1:8], results, bytes(packet[at:size])


def unpack_result(packet: Buffer, size: int) -> Announced:
    """Return number, name, data type, shape, how and range of a result."""
    result, at = _announced(packet, 16)
    if at != size:
        raise WireError("a result is not as long as it says")
    return result


@functools.cache
def _placed(rank: int) -> struct.Struct:
    return struct.Struct(f"<BB{rank}QBIQQ")  # tensor, how and range


def _announced(packet: Buffer, start: int) -> tuple[Announced, int]:
    try:
        number, n = _NAMED.unpack_from(packet, start)
        at = start + 6 + n
        name = str(packet[start + 6 : at], "utf-8")
        rest = _placed(packet[at + 1])
        dtype, _, *shape, how, memory, offset, length = rest.unpack_from(packet, at)
    except (struct.error, IndexError, UnicodeDecodeError) as err:
        raise WireError(f"a result: {err}") from None
    return (number, name, dtype, tuple(shape), how, Extent(memory, offset, length)), at + rest.size


def unpack_region(packet: Buffer, size: int) -> tuple[int, int, int, Extent]:
    """Return the result's number, offset, length and range of a region."""
    if size != 56:
        raise WireError("a region is not as long as it should be")
    number, offset, length, *place = _REGION.unpack_from(packet, 16)
    return number, offset, length, Extent._make(place)


def encoded(text: str) -> bytes:
    """Return a text in UTF-8, which has no lone surrogates: two names must not become one."""
    try:
        return text.encode()
    except UnicodeEncodeError as err:
        part = text[max(0, err.start - 32) : err.end + 32]
        raise ValueError(f"{part!r} has a lone surrogate, which no text in UTF-8 can have; use another name") from None


def to_json(value: Any) -> bytes:
    """Return value as the JSON of a message."""
    return encoded(json.dumps(value, separators=(",", ":"), ensure_ascii=False))


def words(text: str) -> str:
    """Return a text for people, whose lone surrogates are replaced."""
    return text.encode(errors="replace").decode()


def from_json(raw: Buffer) -> dict[str, Any]:
    """Return the object that the JSON of a message is, an empty one for none."""
    value = any_json(raw)
    if not isinstance(value, dict):
        raise WireError("json of a message is not an object")
    return value


def any_json(raw: Buffer) -> Any:
    """Return the value that the JSON of a message is, an empty object for none."""
    try:
        return json.loads(bytes(raw)) if raw else {}
    except ValueError as err:
        raise WireError(f"json of a message: {err}") from None


def _write(out: bytearray, body: tuple[tuple[str, Any], ...], fields: dict[str, Any]) -> None:
    for name, element in body:
        if element == "tensor":
            out += tensor(fields["dtype"], fields["shape"])
        elif element in _NUMBERS:
            out += _NUMBERS[element].pack(fields.get(name, 0))
        elif element == "text":
            out += text(fields.get(name, ""))
        elif element == "texts":
            out += texts(fields.get(name, ()))
        elif element == "range":
            out += RANGE.pack(*fields.get(name, NOWHERE))
        elif element == "ranges":
            ranges = fields.get(name, ())
            out += _U16.pack(len(ranges)) + b"".join([RANGE.pack(*r) for r in ranges])
        elif element == "timings":
            out += struct.pack("<7Q", *fields.get(name, (0,) * 7))
        elif element == "json":
            out += fields.get(name, b"")
        else:
            entries = fields.get(name, ())
            out += _U16.pack(len(entries))
            for entry in entries:
                _write(out, element, entry)


def _read(packet: memoryview, at: int, body: tuple[tuple[str, Any], ...], fields: dict[str, Any]) -> int:
    for name, element in body:
        if element == "tensor":
            fields["dtype"], rank = struct.unpack_from("<BB", packet, at)
            fields["shape"] = list(struct.unpack_from(f"<{rank}Q", packet, at + 2))
            at += 2 + 8 * rank
        elif element in _NUMBERS:
            (fields[name],) = _NUMBERS[element].unpack_from(packet, at)
            at += _NUMBERS[element].size
        elif element == "text":
            fields[name], at = _read_text(packet, at)
        elif element == "range":
            fields[name] = Extent._make(RANGE.unpack_from(packet, at))
            at += RANGE.size
        elif element == "timings":
            fields[name] = list(struct.unpack_from("<7Q", packet, at))
            at += 56
        elif element == "json":
            fields[name] = bytes(packet[at:])
            at = len(packet)
        else:
            (count,) = _U16.unpack_from(packet, at)
            at += 2
            entries: list[Any] = []
            for _ in range(count):
                if element == "texts":
                    key, at = _read_text(packet, at)
                    value, at = _read_text(packet, at)
                    entries.append([key, value])
                elif element == "ranges":
                    entries.append(Extent._make(RANGE.unpack_from(packet, at)))
                    at += RANGE.size
                else:
                    entry: dict[str, Any] = {}
                    at = _read(packet, at, element, entry)
                    entries.append(entry)
            fields[name] = entries
    return at


def _read_text(packet: memoryview, at: int) -> tuple[str, int]:
    (n,) = _U16.unpack_from(packet, at)
    end = at + 2 + n
    if end > len(packet):
        raise WireError("a text ends too early")
    return str(packet[at + 2 : end], "utf-8"), end
