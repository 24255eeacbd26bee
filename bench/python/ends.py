"""The processes of the benchmark: python ends.py KIND [ADDRESS].

A client reads lines such as "echo 268435456 1": what to do, the bytes of a tensor, and how
often. It answers each with the median seconds of one. A server prints its address. All end
with their input. What they measure, and how fair it is, is in docs/benchmarks.md.
"""

import os
import socket
import statistics
import sys
import threading
import time
import zlib

import numpy as np

BATCH = 1 << 20  # bytes in a batch of Flight
PAGE = 1024  # float32s in a page


def tensor(size, empty=np.empty):
    x = empty(size // 4, "float32")
    x[:] = np.arange(size // 4, dtype="float32")
    return x


def serve_line(do, make=tensor):
    """Answer lines. do has one move of a tensor done, and returns the result."""
    print("ready", flush=True)
    x = np.empty(0, "float32")
    for line in sys.stdin:
        op, size, count = line.split()
        size = int(size)
        if x.nbytes != size:
            x = make(size)
        times = []
        for _ in range(int(count)):
            x[::PAGE] += 1  # so that an earlier result does not match
            start = time.perf_counter()
            y = do(op, x)
            times.append(time.perf_counter() - start)
            if op == "sink":
                right = int(np.frombuffer(y, "uint64")[0]) == size
            else:
                right = np.array_equal(np.frombuffer(y, "uint32"), x.view("uint32"))
            if not right:
                sys.exit(f"{sys.argv[1]}: {op} gives something else")
            del y
        print(statistics.median(times), flush=True)


def ferry(address, empty):
    """The Python client, with inputs in ordinary memory or in that of the link."""
    import ctypes

    import tensorferry as tf

    with tf.connect(address) as client:

        def do(op, x):
            if op != "loop":
                return client.compute(op, x)
            # Into the link's memory, to the program and back, below the package's API.
            link = client._link
            held = link.take(x.nbytes)
            ctypes.memmove(held.address, x.ctypes.data, x.nbytes)
            said = link.ask("loop", 30, range=held.extent(x.nbytes))
            assert said["range"] == list(held.extent(x.nbytes)), said
            return held.export(x.nbytes)

        serve_line(do, (lambda size: tensor(size, client.empty)) if empty else tensor)


def bare(_):
    """What the link cannot undercut: the same copy, and a message and its answer over such a socket."""
    import ctypes
    import mmap

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        while theirs.send(theirs.recv(1 << 16) or sys.exit(0)):
            pass
    theirs.close()
    place = mmap.mmap(-1, 256 << 10)

    def do(op, x):
        held = (ctypes.c_ubyte * x.nbytes).from_buffer(place)
        ctypes.memmove(held, x.ctypes.data, x.nbytes)
        ours.send(b"0123456789")
        ours.recv(1 << 16)
        return held

    serve_line(do)


def stock(address):
    """examples/python/stock_grpcio.py: generated code, and its own checksums."""
    from stock_grpcio import Session

    session = Session(address)
    serve_line(lambda op, x: session.compute(op, x, [x.size]))
    session.close()


def checksum(column, data):
    """Compare a batch's checksum with what came beside it."""
    if data is None or zlib.crc32(column) != int.from_bytes(data.to_pybytes(), "little"):
        raise ValueError("a batch arrived damaged")


class Batches:
    """One direction each of a Flight stream: a tensor goes and comes as batches over it."""

    def __init__(self, sums):
        import pyarrow as pa

        self.pa, self.sums = pa, sums
        self.schema = pa.schema([("x", pa.float32())])

    def send(self, writer, x):
        step = BATCH // 4
        for at in range(0, x.size, step):
            part = x[at : at + step]
            column = self.pa.Array.from_buffers(self.pa.float32(), part.size, [None, self.pa.py_buffer(part)])
            batch = self.pa.RecordBatch.from_arrays([column], schema=self.schema)
            if self.sums:
                writer.write_with_metadata(batch, zlib.crc32(part).to_bytes(4, "little"))
            else:
                writer.write_batch(batch)

    def receive(self, chunk):
        """Return the values of a batch, without a copy."""
        column = chunk.data.column(0).to_numpy()
        if self.sums:
            checksum(column, chunk.app_metadata)
        return column

    def fill(self, reader, x):
        at = 0
        while at < x.size:
            part = self.receive(reader.read_chunk())
            x[at : at + part.size] = part
            at += part.size


def flight(address, sums):
    """Arrow Flight: DoPut, and a DoExchange that stays open."""
    import pyarrow.flight as fl

    batches = Batches(sums)
    client = fl.connect(f"grpc://{address}")
    writer, reader = client.do_exchange(fl.FlightDescriptor.for_path("tensor"))
    writer.begin(batches.schema)
    y = np.empty(0, "float32")

    def do(op, x):
        nonlocal y
        if op == "sink":
            upload, answer = client.do_put(fl.FlightDescriptor.for_path(str(x.size)), batches.schema)
            batches.send(upload, x)
            upload.done_writing()
            size = answer.read()
            upload.close()
            return size
        if y.size != x.size:
            y = np.zeros_like(x)  # touched before its first use
        if x.nbytes <= BATCH:
            batches.send(writer, x)
            batches.fill(reader, y)
            return y
        sender = threading.Thread(target=batches.send, args=(writer, x))
        sender.start()
        batches.fill(reader, y)
        sender.join()
        return y

    serve_line(do)
    writer.close()


def flight_server(sums):
    import pyarrow.flight as fl

    batches = Batches(sums)

    class Server(fl.FlightServerBase):
        place = np.empty(0, "float32")

        def do_put(self, context, descriptor, reader, writer):
            size = int(descriptor.path[0])
            if self.place.size != size:
                self.place = np.zeros(size, "float32")
            batches.fill(reader, self.place)
            writer.write(self.place.nbytes.to_bytes(8, "little"))

        def do_exchange(self, context, descriptor, reader, writer):
            writer.begin(batches.schema)
            for chunk in reader:
                batches.send(writer, batches.receive(chunk))

    with Server("grpc://127.0.0.1:0") as server:
        print(f"127.0.0.1:{server.port}", flush=True)
        sys.stdin.read()


def returned(x):
    return x


def counted(x):
    import torch

    return torch.tensor(x.numel() * x.element_size())


def torch_rpc(rank, address):
    """torch.distributed.rpc over TCP: it has no checksums."""
    import torch
    import torch.distributed.rpc as rpc

    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://{address}",
        rpc_timeout=120,
        # Without shared memory, which it takes where both are on one machine.
        _transports=["uv"],
        _channels=["basic"],
    )
    rpc.init_rpc(f"end{rank}", rank=rank, world_size=2, rpc_backend_options=options)

    def do(op, x):
        return rpc.rpc_sync("end0", counted if op == "sink" else returned, args=(torch.from_numpy(x),)).numpy()

    if rank:
        serve_line(do)
    rpc.shutdown()


def torch_server():
    """The address is that of a meeting, which the client must come to."""
    try:
        import torch.distributed.rpc  # noqa: F401
    except ImportError as err:
        print(f"missing: {err}", flush=True)
        return
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = "{}:{}".format(*s.getsockname())
    print(address, flush=True)
    torch_rpc(0, address)


KINDS = {
    "numpy": lambda at: ferry(at, False),
    "empty": lambda at: ferry(at, True),
    "bare": bare,
    "stock": stock,
    "flight": lambda at: flight(at, False),
    "flight-crc": lambda at: flight(at, True),
    "torch": lambda at: torch_rpc(1, at),
    "flight-server": lambda: flight_server(False),
    "flight-crc-server": lambda: flight_server(True),
    "torch-server": torch_server,
}

if __name__ == "__main__":
    # For functions that torch sends by name.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    KINDS[sys.argv[1]](*sys.argv[2:])
