"""Models of the tests of engine/worker, in the standard library alone."""

import asyncio
import os
import signal
import sys
import time

import tensorferry as tf


def _bytes(x):
    return x.data


@tf.model(rows=1, block_rows=7, inputs={"x": ("uint8", [-1, -1])}, outputs={"y": ("uint8", [-1, -1])}, array="tensor")
def echo(x):
    return x


@tf.model(rows=1, block_rows=7, inputs={"x": ("uint8", [-1, -1])}, outputs={"y": ("uint8", [-1, -1])}, array="tensor")
def plus_one(x, call):
    y = call.empty(x.shape, "uint8")
    _bytes(y)[:] = bytes((b + 1) & 255 for b in _bytes(x))
    return y


@tf.model(rows=1, block_rows=7, inputs={"x": ("uint8", [-1, -1])}, outputs={"y": ("uint8", [-1, 1])}, array="tensor")
def first(x, call):
    y = call.empty((x.shape[0], 1), "uint8")
    if x.shape[0]:
        _bytes(y)[:] = bytes(_bytes(x))[:: x.shape[1]]
    return y


@tf.model(rows=1, block_rows=7, inputs={"x": ("uint8", [-1, -1])}, outputs={"y": ("uint8", [-1, -1])}, array="tensor")
async def later(x, call):
    await asyncio.sleep(0.001 * (call.row % 3))
    return plus_one(x, call)


@tf.model(rows=1, block_rows=7, inputs={"x": ("uint8", [-1, -1])}, outputs={"y": ("uint8", [-1, -1])}, array="tensor", concurrency=3)
def threads(x, call):
    return plus_one(x, call)


@tf.model(inputs={"x": "uint8"}, params={"do": tf.Param(str, "")}, array="tensor", rows=1)
async def waits(x, call):
    """Waits for a call that has something to do."""
    what, waits.calls = call.params["do"], waits.calls + 1
    while not what:
        await asyncio.sleep(0.001)
    while waits.calls < 4:
        await asyncio.sleep(0.001)
    if what == "exit":
        os._exit(3)
    return x


waits.calls = 0


@tf.model(array="tensor")
def backwards(x, call):
    y = call.empty(x.shape, x.dtype)
    _bytes(y)[:] = bytes(_bytes(x))[::-1]
    return y


@tf.model(inputs={"x": "uint8"}, params={"do": tf.Param(str, "")}, array="tensor", rows=1)
def does(x, call):
    """Does what a test asks for."""
    what, _, much = call.params["do"].partition(" ")
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "exit":
        sys.stdout.flush()
        os._exit(3)
    elif what == "sleep":
        time.sleep(float(much))
    elif what == "wait":
        while not call.cancelled:
            time.sleep(0.001)
    elif what == "say":
        print("computing", much)
    elif what == "many":
        for i in range(int(much)):
            print("line", i)
    elif what == "fail":
        raise ZeroDivisionError("secret")
    elif what == "public":
        raise tf.ModelError("no such weather")
    elif what == "rows":
        return call.empty((1 + x.shape[0],) + tuple(x.shape[1:]), "uint8")
    elif what == "garbage":
        call._worker.link.send(b"garbage")
        time.sleep(60)
    elif what == "foreign":  # names a range that is not its own
        from tensorferry import _wire as wire

        link = call._worker.link
        link.send(wire.encode(wire.ANSWER, call._block.run["id"], outputs=[{"dtype": 6, "shape": list(x.shape), "range": (1, 1 << 20, 8)}]))
        time.sleep(60)
    elif what == "twice":
        from tensorferry import _wire as wire

        for _ in range(3):
            call._worker.link.send(wire.encode(wire.ANSWER, call._block.run["id"], code=2, json=b"{}"))
    elif what == "scribble":  # over all that it has mapped
        for m in call._worker.link.memories.values():
            m.map[:] = b"\xee" * m.size
    elif what == "pid":
        y = call.empty((x.shape[0], 8), "uint8")
        _bytes(y)[:] = os.getpid().to_bytes(8, "little") * x.shape[0]
        return y
    return x


@tf.model(inputs={"x": "uint8"}, rows=1, block_rows=3, stateful=True, array="tensor")
def counts(x, call):
    """Adds to each byte how many rows of the call came before the block, in one process."""
    seen = call.state.get("seen", 0)
    call.state["seen"] = seen + x.shape[0]
    y = call.empty(x.shape, "uint8")
    _bytes(y)[:] = bytes((b + seen) & 255 for b in _bytes(x))
    return y


def broken():
    raise RuntimeError("no weights here")


def dies():
    os.kill(os.getpid(), signal.SIGKILL)


def once():
    """Loads only where the file that $ONCE names does not exist yet."""
    path = os.environ["ONCE"]
    if os.path.exists(path):
        raise RuntimeError("a second time")
    open(path, "w").close()
    return does


@tf.model(rows=1, inputs={"x": ("uint8", [-1, -1])}, outputs={"y": ("uint8", [-1, -1]), "s": ("uint8", [-1, 1])}, array="tensor")
def both(x, call):
    y = call.empty((x.shape[0], 1), "uint8")
    if x.shape[0]:
        _bytes(y)[:] = bytes(_bytes(x))[:: x.shape[1]]
    return {"y": x, "s": y}


class Kept:
    """Says when it is closed."""

    def __init__(self, what):
        self.what, self.data = what, None

    def close(self):
        print("closed", self.what)
        raise ZeroDivisionError("which harms nobody")


@tf.model(inputs={"x": ("uint8", [-1, 1])}, params={"do": tf.Param(str, "")}, outputs={"y": ("uint8", [-1, 16])}, rows=1, block_rows=3, array="tensor")
def remembers(x, call):
    """Tells the process, the first row and the blocks before of what it keeps, and does what the first row says."""
    kept = call.state.setdefault("kept", Kept(call.params["do"] or "unnamed"))
    call.state["again"] = kept
    call.state["blocks"] = 1 + call.state.get("blocks", 0)
    what = _bytes(x)[0] if x.shape[0] else 0
    if what == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == 2:
        raise ValueError("2")
    elif what == 3:
        time.sleep(60)
    elif what == 4:
        while not call.cancelled:
            time.sleep(0.001)
    elif what >= 10:  # MiB
        kept.data = [tf.Tensor(bytearray(what << 20))]
    y = call.empty((x.shape[0], 16), "uint8")
    said = (os.getpid(), call.row, call.state["blocks"], call.max_rows)
    _bytes(y)[:] = b"".join(n.to_bytes(4, "little") for n in said) * x.shape[0]
    return y
