"""Tensors of any size with grpcio and what protoc makes of the .proto, and nothing of tensorferry.

docs/clients.md shows this program and explains it; docs/wire.md has the rules.
"""

import os
import queue
import uuid
import zlib

import grpc
from tensorferry.v1 import tensorferry_pb2 as pb
from tensorferry.v1 import tensorferry_pb2_grpc

try:  # CRC-32C where there is a fast one, else the CRC-32 of the standard library
    from google_crc32c import extend

    CHECKSUM = pb.CHECKSUM_CRC32C
except ImportError:
    CHECKSUM = pb.CHECKSUM_CRC32

CHUNK = 1 << 20  # bytes: the most of a chunk in either direction
ALLOWANCE = 1 << 20  # bytes that may come without credit


def checksum(chunk):
    """The checksum of a chunk: over the tensor's ID, the index and the payload."""
    seed = chunk.tensor_id + chunk.index.to_bytes(4, "little")
    if CHECKSUM == pb.CHECKSUM_CRC32C:
        return extend(extend(0, seed), chunk.data)
    return zlib.crc32(chunk.data, zlib.crc32(seed))


def digest(data):
    """The digest of a whole tensor, for push and pull."""
    import xxhash

    return xxhash.xxh3_128_digest(data)


def connect(address, ca=None, token=None, cert=None, key=None, server_name=None):
    """A stub. ca, token, cert and key are files, token of a token alone; without ca and cert nothing is encrypted."""

    def read(path):
        if path:
            with open(path, "rb") as file:
                return file.read()
        return None

    if not ca and not cert:
        return tensorferry_pb2_grpc.TensorServiceStub(grpc.insecure_channel(address))
    secure = grpc.ssl_channel_credentials(read(ca), read(key), read(cert))
    if token:  # goes with every RPC, as metadata: "authorization: Bearer TOKEN"
        text = read(token).decode().strip()
        secure = grpc.composite_channel_credentials(secure, grpc.access_token_call_credentials(text))
    options = [("grpc.ssl_target_name_override", server_name)] if server_name else []
    return tensorferry_pb2_grpc.TensorServiceStub(grpc.secure_channel(address, secure, options))


def hello():
    return pb.Hello(
        version=1,
        session_id=uuid.uuid4().bytes,
        max_chunk_bytes=CHUNK,
        allowance_bytes=ALLOWANCE,
        checksum=CHECKSUM,
        max_open_tensors=64,
    )


class Outgoing:
    """A tensor to send. data has its bytes: dense, row-major, little-endian."""

    def __init__(self, dtype, shape, data, chunk_bytes, **rest):
        view = memoryview(data)
        self.data = view.cast("B") if view.nbytes else b""
        self.desc = pb.TensorDesc(
            tensor_id=uuid.uuid4().bytes,
            dtype=dtype,
            shape=shape,
            size_bytes=len(self.data),
            chunk_bytes=chunk_bytes,
            **rest,
        )
        self.count = max(1, -(-len(self.data) // chunk_bytes))  # an empty tensor has one empty chunk
        self.sent = 0

    def chunk(self, index):
        at = index * self.desc.chunk_bytes
        part = bytes(self.data[at : at + self.desc.chunk_bytes])
        chunk = pb.Chunk(tensor_id=self.desc.tensor_id, index=index, data=part)
        chunk.checksum = checksum(chunk)
        return pb.Frame(chunk=chunk)

    def below(self, limit):
        """The chunks below a limit that were not sent yet."""
        while self.sent < min(limit, self.count):
            yield self.chunk(self.sent)
            self.sent += 1


class Incoming:
    """A tensor on its way in. Chunks may come in any order, and more than once."""

    def __init__(self, desc):
        self.desc = desc
        self.data = bytearray(desc.size_bytes)
        self.count = max(1, -(-desc.size_bytes // desc.chunk_bytes))
        self.missing = set(range(self.count))
        self.received_below = 0
        self.damaged = 0

    def put(self, chunk):
        """Put a chunk in its place. False: its checksum is wrong, so it has to come again."""
        if checksum(chunk) != chunk.checksum:
            self.damaged += 1
            return False
        at = chunk.index * self.desc.chunk_bytes
        if len(chunk.data) != min(self.desc.chunk_bytes, len(self.data) - at):
            raise ValueError(f"chunk {chunk.index} has {len(chunk.data)} bytes")
        self.data[at : at + len(chunk.data)] = chunk.data
        self.missing.discard(chunk.index)
        while self.received_below < self.count and self.received_below not in self.missing:
            self.received_below += 1
        return True


class Session:
    """One session, for one thread: a call goes out, its results come in."""

    def __init__(self, stub):
        self.out = queue.SimpleQueue()  # of frames; None ends it
        self.frames = stub.StreamTensors(iter(self.out.get, None))
        ours = hello()
        self.out.put(pb.Frame(hello=ours))
        theirs = next(self.frames).hello
        if (theirs.version, theirs.session_id, theirs.checksum) != (1, ours.session_id, ours.checksum):
            raise ValueError(f"the server's hello does not fit ours: {theirs}")
        self.chunk_bytes = min(CHUNK, theirs.max_chunk_bytes or CHUNK)
        self.allowance = theirs.allowance_bytes

    def compute(self, model, inputs, params=None):
        """Run a model. inputs: port, "" for the only one, to (dtype, shape, data). Returns port to Incoming."""
        call = pb.Call(id=uuid.uuid4().bytes, model=model, params=params)
        sending, free = {}, self.allowance
        for port, (dtype, shape, data) in inputs.items():
            x = Outgoing(dtype, shape, data, self.chunk_bytes, call_id=call.id, port=port)
            x.desc.on_allowance = len(x.data) <= free and x.count <= 4096
            free -= len(x.data) if x.desc.on_allowance else 0
            call.inputs.append(pb.Input(port=port, tensor_id=x.desc.tensor_id))
            sending[x.desc.tensor_id] = x
        self.out.put(pb.Frame(calls=[call], descs=[x.desc for x in sending.values()]))
        for x in sending.values():
            if x.desc.on_allowance:
                self.send(x.below(x.count))

        results, done = {}, None
        while done is None or any(results[o.tensor_id].missing for o in done.outputs):
            frame = next(self.frames)
            for desc in frame.descs:
                y = results[desc.tensor_id] = Incoming(desc)
                if not desc.on_allowance:  # there is memory for all of it
                    self.out.put(pb.Frame(credits=[pb.Credit(tensor_id=desc.tensor_id, chunk_limit=y.count)]))
            for credit in frame.credits:
                if credit.tensor_id in sending:
                    self.send(sending[credit.tensor_id].below(credit.chunk_limit))
            for ack in frame.acks:
                if ack.tensor_id in sending:
                    self.send(sending[ack.tensor_id].chunk(index) for index in ack.resend)
            for end in frame.dones:
                if end.call_id == call.id:
                    done = end
            if done and done.code:
                raise RuntimeError(f"{model}: code {done.code}: {done.message}")
            if frame.HasField("chunk") and frame.chunk.tensor_id in results:
                self.take(results[frame.chunk.tensor_id], frame.chunk)
        return {o.port: results[o.tensor_id] for o in done.outputs}

    def send(self, frames):
        for frame in frames:
            self.out.put(frame)

    def take(self, y, chunk):
        again = [] if y.put(chunk) else [chunk.index]
        if y.damaged > 2:
            raise RuntimeError("chunks arrive damaged again and again")
        ack = pb.Ack(tensor_id=y.desc.tensor_id, received_below=y.received_below, resend=again)
        self.out.put(pb.Frame(acks=[ack]))

    def close(self):
        self.out.put(None)
        for _ in self.frames:  # to the RPC's status
            pass


def push(stub, name, dtype, shape, data):
    """Store a tensor under a name."""
    largest = stub.GetServiceInfo(pb.GetServiceInfoRequest()).limits["chunk_bytes"]
    x = Outgoing(dtype, shape, data, min(CHUNK, largest), name=name)

    def frames():
        yield pb.Frame(hello=hello(), descs=[x.desc])
        yield from x.below(x.count)

    for summary in stub.PushTensors(frames()).summaries:
        if summary.code:
            raise RuntimeError(f"{name}: code {summary.code}: {summary.message}")
        if summary.digest != digest(x.data):
            raise RuntimeError(f"{name}: the server has stored other bytes")


def pull(stub, name):
    """Fetch the tensor of a name."""
    y, whole = None, False
    request = pb.PullTensorsRequest(hello=hello(), selections=[pb.Selection(name=name)])
    for frame in stub.PullTensors(request):
        for desc in frame.descs:
            y = Incoming(desc)
        if frame.HasField("chunk") and not y.put(frame.chunk):
            raise RuntimeError(f"{name}: a chunk arrived damaged; pull it again")
        for summary in frame.summaries:
            if summary.code:
                raise RuntimeError(f"{name}: code {summary.code}: {summary.message}")
            whole = not y.missing and summary.digest == digest(y.data)
    if not whole:
        raise RuntimeError(f"{name}: it did not arrive as the server has it")
    return y


def main():
    from array import array

    files = {name: os.environ.get("TENSORFERRY_" + name.upper()) for name in ("ca", "token", "cert", "key")}
    address = os.environ.get("TENSORFERRY_SERVER", "127.0.0.1:50051")
    stub = connect(address, **files, server_name=os.environ.get("TENSORFERRY_SERVER_NAME"))
    session = Session(stub)
    for n in (0, 1, CHUNK // 4, CHUNK // 4 + 1, 3_000_000):
        x = array("f", range(-(n // 2), n - n // 2))
        y = session.compute("relu", {"": (pb.DATA_TYPE_FLOAT32, [n], x)})["y"]
        assert array("f", bytes(y.data)) == array("f", (max(v, 0.0) for v in x)), f"a wrong result of {n} values"
        push(stub, "first", pb.DATA_TYPE_FLOAT32, [n], x)
        assert pull(stub, "first").data == x.tobytes(), f"{n} values come back as others"
    session.close()
    print(f"{n} values through relu, and through the store")


if __name__ == "__main__":
    main()
