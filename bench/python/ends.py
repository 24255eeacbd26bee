"""The processes of the benchmarks: python ends.py KIND [ADDRESS].

A client reads lines such as "echo 268435456 1": what to do, the bytes of a tensor, and how
often. It answers each with the seconds of each. A server prints its address. All end
with their input. The kind bench-end is an end of Arrow Flight for the Go program of bench/,
which calls it as bench/measure says. What they measure, and how fair it is, is in
docs/benchmarks.md.
"""

import functools
import json
import os
import queue
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import gpt
import numpy as np
from common import answer, join, rpc_server

BATCH = 1 << 20  # bytes in a batch of Flight
PAGE = 1024  # float32s in a page
ROWS = {"step": 2048, "prompt": 768, "whole": 768}  # float32s in a row


def tensor(size, empty=np.empty):
    x = empty(size // 4, "float32")
    x[:] = np.arange(size // 4, dtype="float32")
    return x


def moves(do, make=tensor, begin=None):
    """Answer lines. do has one move of a tensor done, and returns the result; begin a sequence of a GPT's rows."""
    x = np.empty(0, "float32")

    def move(op, size, count):
        nonlocal x
        if x.nbytes != size:
            x = make(size)
        times = []
        for _ in range(count):
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
        return {"seconds": times}

    unsplit = functools.cache(lambda count: gpt.text(gpt.here(), count)[0])

    def token(size, count):
        with closing(begin()) as sequence:
            tokens, times = gpt.text(sequence.step, count)
        if tokens != unsplit(count):
            sys.exit(f"{sys.argv[1]}: the GPT writes something else")
        return {"seconds": times}

    works = {op: functools.partial(move, op) for op in ("sink", "echo", "relu", "model", "unary", "loop", *ROWS)}
    answer({**works, "token": token, "alone": lambda _, count: {"seconds": gpt.text(gpt.here(), count)[1]}})


def ferry(address, empty):
    """The Python client, with inputs in ordinary memory or in that of the link."""
    import ctypes

    import tensorferry as tf

    with tf.connect(address) as client:
        sequence = functools.cache(lambda: client.sequence("steps", 1 << 24))

        def do(op, x):
            if op in ROWS:
                x = x.reshape(-1, ROWS[op])
                return client.compute("steps", x) if op == "whole" else sequence().step(x)
            if op != "loop":
                return client.compute(op, x)
            # Into the link's memory, to the program and back, below the package's API.
            link = client._link
            held = link.take(x.nbytes)
            ctypes.memmove(held.address, x.ctypes.data, x.nbytes)
            said = link.ask("loop", 30, range=held.extent(x.nbytes))
            assert said["range"] == list(held.extent(x.nbytes)), said
            return held.export(x.nbytes)

        make = (lambda size: tensor(size, client.empty)) if empty else tensor
        moves(do, make, lambda: client.sequence("trunk", gpt.TOKENS))


class Steps:
    """A sequence over a stream of grpcio, as one writes it."""

    def __init__(self, channel, model):
        self.rows = queue.SimpleQueue()
        self.results = channel.stream_stream(f"/rows/{model}")(iter(self.rows.get, None))

    def step(self, x):
        self.rows.put(x.tobytes())
        return np.frombuffer(next(self.results), "float32").reshape(x.shape)

    def close(self):
        self.rows.put(None)


def grpcio(address):
    import grpc

    with grpc.insecure_channel(address) as channel:
        unary, stream = channel.unary_unary("/rows/unary"), functools.cache(lambda op: Steps(channel, op))

        def do(op, x):
            return np.frombuffer(unary(x.tobytes()), "float32") if op == "unary" else stream(op).step(x)

        moves(do, begin=lambda: Steps(channel, "trunk"))


def grpcio_server():
    """A unary call, and streams, of which the state of two is the handler's."""
    import grpc

    def relu(x):
        return np.maximum(x, 0)

    def call(data, context):
        return relu(np.frombuffer(data, "float32")).tobytes()

    def handler(begin):
        def results(rows, context):
            step = begin()
            for row in rows:
                yield step(np.frombuffer(row, "float32").reshape(1, -1)).tobytes()

        return grpc.stream_stream_rpc_method_handler(results)

    streams = {"step": lambda: returned, "relu": lambda: relu, "trunk": gpt.here}
    handlers = {name: handler(begin) for name, begin in streams.items()}
    handlers["unary"] = grpc.unary_unary_rpc_method_handler(call)
    server = grpc.server(ThreadPoolExecutor(32))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("rows", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"127.0.0.1:{port}", flush=True)
    sys.stdin.read()


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

    moves(do)


def stock(address):
    """examples/python/stock_grpcio.py: generated code, and its own checksums, here of zlib."""
    from stock_grpcio import Session, connect, pb

    session = Session(connect(address))

    def do(op, x):
        (y,) = session.compute(op, {"": (pb.DATA_TYPE_FLOAT32, [x.size], x)}).values()
        return y.data

    moves(do)
    session.close()


class Batches:
    """One direction each of a Flight stream: a tensor goes and comes as batches over it.

    The checksum is CRC-32 in C, of isal: of those that Python has it is the fastest.
    """

    def __init__(self, sums, step=BATCH):
        import pyarrow as pa
        from isal.isal_zlib import crc32

        self.pa, self.sums, self.crc32, self.step = pa, sums, crc32, step
        self.schema = pa.schema([("x", pa.float32())])

    def send(self, writer, x):
        step = self.step // 4
        for at in range(0, x.size, step):
            part = x[at : at + step]
            column = self.pa.Array.from_buffers(self.pa.float32(), part.size, [None, self.pa.py_buffer(part)])
            batch = self.pa.RecordBatch.from_arrays([column], schema=self.schema)
            if self.sums:
                writer.write_with_metadata(batch, self.crc32(part).to_bytes(4, "little"))
            else:
                writer.write_batch(batch)

    def receive(self, chunk):
        """Return the values of a batch, without a copy."""
        return self.checked(chunk.data.column(0).to_numpy(), chunk)

    def checked(self, values, chunk):
        data = chunk.app_metadata
        if self.sums and (data is None or self.crc32(values) != int.from_bytes(data.to_pybytes(), "little")):
            raise ValueError("a batch arrived damaged")
        return values

    def fill(self, reader, x):
        """Return when the first batch was in its place."""
        at = first = 0
        while at < x.size:
            chunk = reader.read_chunk()
            part = x[at : at + chunk.data.num_rows]
            part[:] = chunk.data.column(0).to_numpy()
            at += self.checked(part, chunk).size  # in its place, where it is in the cache
            first = first or time.perf_counter()
        return first


class FlightClient:
    """Arrow Flight in C++: DoPut, and a DoExchange that stays open."""

    def __init__(self, address, batches):
        import pyarrow.flight as fl

        self.path, self.batches = fl.FlightDescriptor.for_path, batches
        self.client = fl.connect(address)
        self.writer, self.reader = self.client.do_exchange(self.path("tensor"))
        self.writer.begin(batches.schema)

    def upload(self, x):
        """Return the size that the server has received."""
        upload, answer = self.client.do_put(self.path(str(x.size)), self.batches.schema)
        self.batches.send(upload, x)
        upload.done_writing()
        size = answer.read()
        upload.close()
        return size

    def echo(self, x, y):
        if x.nbytes <= BATCH:
            self.batches.send(self.writer, x)
            return self.batches.fill(self.reader, y)
        sender = threading.Thread(target=self.batches.send, args=(self.writer, x))
        sender.start()
        first = self.batches.fill(self.reader, y)
        sender.join()
        return first

    def close(self):
        self.writer.close()
        self.client.close()


def flight_service(batches):
    """The class of servers: an upload is put together in their place, an echo goes back from
    the memory that it came in, as one writes it."""
    import pyarrow.flight as fl

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

    return Server


def flight(address, sums):
    client = FlightClient(f"grpc://{address}", Batches(sums))
    y = np.empty(0, "float32")

    def do(op, x):
        nonlocal y
        if op == "sink":
            return client.upload(x)
        if y.size != x.size:
            y = np.zeros_like(x)  # touched before its first use
        client.echo(x, y)
        return y

    moves(do)
    client.close()


def flight_server(sums):
    with flight_service(Batches(sums))("grpc://127.0.0.1:0") as server:
        print(f"127.0.0.1:{server.port}", flush=True)
        sys.stdin.read()


class FlightEnd:
    """An end of Flight that the Go program calls: see End and Role in bench/measure/end.go."""

    def __init__(self, sums, batch):
        self.batches = Batches(sums == "sums", int(batch))
        self.server = self.client = None

    def start(self, role):
        self.source = np.random.default_rng(1).random(role["Size"] // 4, "float32")
        self.to = np.zeros_like(self.source)
        unix, address, host = role["Network"] == "unix", role["Address"], role["Host"] or "127.0.0.1"
        if address:
            self.client = FlightClient(("grpc+unix://" if unix else "grpc://") + address, self.batches)
            return ""
        path = os.path.join(role["Dir"], "s")
        self.server = flight_service(self.batches)(f"grpc+unix://{path}" if unix else f"grpc://{host}:0")
        self.server.place = self.to
        return path if unix else f"{host}:{self.server.port}"

    def prepare(self, job):
        self.to[::PAGE] = -1  # what no source has
        self.cpu = time.process_time()
        return True

    def move(self, job):
        first = job["Op"] == "first-result"  # of an echo
        echo = first or job["Op"] == "echo"
        if not echo and job["Op"] != "upload":
            raise ValueError(f"Arrow Flight has no {job['Op']} here")
        self.to[::PAGE] = -1
        cpu, start = time.process_time(), time.perf_counter()
        if echo:
            at = self.client.echo(self.source, self.to)
        elif int.from_bytes(self.client.upload(self.source).to_pybytes(), "little") != self.source.nbytes:
            raise ValueError("the server says another size")
        took, cpu = time.perf_counter() - start, time.process_time() - cpu
        if echo:
            self.check()  # an upload is the server's to check
        result = {"time_ns": round(took * 1e9), "cpu_ns": round(cpu * 1e9)}
        if first:
            result |= {"time_ns": round((at - start) * 1e9), "total_ns": result["time_ns"]}
        return result

    def finish(self, job):
        cpu = time.process_time() - self.cpu
        if job["Op"] == "upload":
            self.check()
        return {"cpu_ns": round(cpu * 1e9)}

    def check(self):
        if not np.array_equal(self.to.view("uint32"), self.source.view("uint32")):
            raise ValueError("what arrived is not what was sent")

    def close(self):
        for end in (self.client, self.server):
            if end:
                end.close() if end is self.client else end.shutdown()


def bench_end(sums, batch):
    end = FlightEnd(sums, batch)
    for line in sys.stdin:
        call = json.loads(line)
        answer = {"id": call["id"], "result": None, "error": None}
        try:
            answer["result"] = getattr(end, call["method"].removeprefix("End.").lower())(*call["params"])
        except Exception as err:
            answer["error"] = str(err) or repr(err)
        print(json.dumps(answer), flush=True)
    end.close()


def returned(x):
    return x


def counted(x):
    import torch

    return torch.tensor(x.numel() * x.element_size())


def torch_client(address):
    """torch.distributed.rpc over TCP: it has no checksums."""
    import torch

    rpc = join(1, address)

    def do(op, x):
        return rpc.rpc_sync("end0", counted if op == "sink" else returned, args=(torch.from_numpy(x),)).numpy()

    moves(do)
    rpc.shutdown()


KINDS = {
    "numpy": lambda at: ferry(at, False),
    "empty": lambda at: ferry(at, True),
    "bare": bare,
    "grpc": grpcio,
    "grpc-server": grpcio_server,
    "stock": stock,
    "flight": lambda at: flight(at, False),
    "flight-crc": lambda at: flight(at, True),
    "torch": torch_client,
    "flight-server": lambda: flight_server(False),
    "flight-crc-server": lambda: flight_server(True),
    "torch-server": rpc_server,
    "bench-end": bench_end,
}

if __name__ == "__main__":
    KINDS[sys.argv[1]](*sys.argv[2:])
