"""A tensor of any size through a model, with what protoc makes of the .proto and nothing else.

This is what a client in another language does; docs/wire.md has the rules. It needs grpcio
and the generated modules:

    pip install grpcio grpcio-tools
    python -m grpc_tools.protoc -I api --python_out=. --grpc_python_out=. api/tensorferry/v1/tensorferry.proto
"""

import os
import queue
import uuid
import zlib

import grpc
from tensorferry.v1 import tensorferry_pb2 as pb
from tensorferry.v1 import tensorferry_pb2_grpc

CHUNK = 1 << 20
FLOAT32 = pb.DATA_TYPE_FLOAT32


def checksum(tensor_id, index, data):
    return zlib.crc32(data, zlib.crc32(tensor_id + index.to_bytes(4, "little")))


class Session:
    """One session of one thread: calls go out, frames come in."""

    def __init__(self, address):
        self.channel = grpc.insecure_channel(address, [("grpc.max_receive_message_length", 8 << 20)])
        self.out = queue.SimpleQueue()  # of frames; None ends it
        frames = tensorferry_pb2_grpc.TensorServiceStub(self.channel).StreamTensors(iter(self.out.get, None))
        self.session = uuid.uuid4().bytes
        self.out.put(
            pb.Frame(
                hello=pb.Hello(
                    version=1,
                    session_id=self.session,
                    max_chunk_bytes=CHUNK,
                    checksum=pb.CHECKSUM_CRC32,
                    max_open_tensors=64,
                )
            )
        )
        self.frames = frames
        hello = next(frames).hello
        self.chunk = min(CHUNK, hello.max_chunk_bytes or CHUNK)

    def compute(self, model, data, shape, dtype=FLOAT32):
        """Run a model with one input and one result, whose bytes it returns."""
        data = memoryview(data).cast("B")
        call, tensor = uuid.uuid4().bytes, uuid.uuid4().bytes
        self.out.put(
            pb.Frame(
                calls=[pb.Call(id=call, model=model, inputs=[pb.Input(tensor_id=tensor)])],
                descs=[
                    pb.TensorDesc(
                        tensor_id=tensor,
                        call_id=call,
                        dtype=dtype,
                        shape=shape,
                        size_bytes=len(data),
                        chunk_bytes=self.chunk,
                    )
                ],
            )
        )
        count = max(1, -(-len(data) // self.chunk))
        sent = 0
        result = place = done = None
        while done is None or (result is not None and result.missing):
            frame = next(self.frames)
            for desc in frame.descs:
                result, place = Result(desc), desc.tensor_id
                self.out.put(pb.Frame(credits=[pb.Credit(tensor_id=place, chunk_limit=result.count)]))
            for credit in frame.credits:
                if credit.tensor_id == tensor:
                    for index in range(sent, min(credit.chunk_limit, count)):
                        self.send(tensor, index, data)
                    sent = max(sent, min(credit.chunk_limit, count))
            for ack in frame.acks:
                for index in ack.resend:
                    self.send(tensor, index, data)
            for done in frame.dones:
                if done.code:
                    raise RuntimeError(f"code {done.code}: {done.message}")
            if frame.HasField("chunk"):
                below = result.put(frame.chunk)
                self.out.put(pb.Frame(acks=[pb.Ack(tensor_id=place, received_below=below)]))
        return result.data

    def send(self, tensor, index, data):
        part = bytes(data[index * self.chunk : (index + 1) * self.chunk])
        self.out.put(
            pb.Frame(chunk=pb.Chunk(tensor_id=tensor, index=index, checksum=checksum(tensor, index, part), data=part))
        )

    def close(self):
        self.out.put(None)
        self.channel.close()


class Result:
    """A result on its way in."""

    def __init__(self, desc):
        self.data = bytearray(desc.size_bytes)
        self.chunk = desc.chunk_bytes
        self.count = self.missing = max(1, -(-desc.size_bytes // desc.chunk_bytes))
        self.here = [False] * self.count
        self.below = 0

    def put(self, chunk):
        if checksum(chunk.tensor_id, chunk.index, chunk.data) != chunk.checksum:
            raise RuntimeError("a chunk arrived damaged; a client of more than an example asks for it again")
        at = chunk.index * self.chunk
        self.data[at : at + len(chunk.data)] = chunk.data
        self.missing -= not self.here[chunk.index]
        self.here[chunk.index] = True
        while self.below < self.count and self.here[self.below]:
            self.below += 1
        return self.below


if __name__ == "__main__":
    from array import array

    session = Session(os.environ.get("TENSORFERRY_SERVER", "127.0.0.1:50051"))
    values = array("f", range(-1_500_000, 1_500_000))
    y = array("f", bytes(session.compute("relu", values, [len(values)])))
    session.close()
    assert y == array("f", (max(v, 0.0) for v in values)), "the server computes something else"
    print(f"{len(y)} values through relu with grpcio alone")
