"""The Python ends of the benchmark of drop-ins: python ends.py server|client STUBS SITE [ADDRESS…].

The servers are the least that the two predecessors' contracts need: torch.load and torch.save of whole
tensors, and numpy. A client reads lines such as "kpu-echo ADDRESS 67108864 5", does so much, and answers
with JSON. Both end with their input.
"""

import asyncio
import functools
import io
import json
import sys
import time
import uuid
from concurrent import futures

import numpy
import torch

sys.path.append(sys.argv[2])  # of another Python of the same version: its grpc, and this one's numpy
sys.path.append(sys.argv[3])
import grpc
from kpu.torch.server import service_pb2 as kpu
from kpu.torch.server import service_pb2_grpc as kpu_grpc
from splitlearn.comm import compute_service_pb2 as split
from splitlearn.comm import compute_service_pb2_grpc as split_grpc

CHUNK = 1 << 20
LARGE = [("grpc.max_send_message_length", 100 << 20), ("grpc.max_receive_message_length", 100 << 20)]
torch.set_num_threads(1)


def chunks(name, tensor):
    """Cut what torch.save makes of a tensor."""
    f = io.BytesIO()
    torch.save(tensor, f)
    data = f.getvalue()
    total = -(-len(data) // CHUNK)
    for i in range(total):
        about = {"shape": list(tensor.shape), "dtype": tensor.dtype, "device": tensor.device, "size_bytes": len(data)}
        yield kpu.TensorChunk(
            tensor_id=name, chunk_number=i, data=data[i * CHUNK : (i + 1) * CHUNK], total_chunks=total,
            is_last=i == total - 1, metadata={} if i else {key: str(value) for key, value in about.items()},
        )  # fmt: skip


async def tensors(stream):
    """Assemble tensors."""
    parts = {}
    async for c in stream:
        have = parts.setdefault(c.tensor_id, {})
        have[c.chunk_number] = c.data
        if len(have) == c.total_chunks:
            del parts[c.tensor_id]
            yield c.tensor_id, torch.load(io.BytesIO(b"".join(have[i] for i in sorted(have))))


class Kpu(kpu_grpc.ServiceServicer):
    def __init__(self):
        self.received = {}  # for the server's life, as the contract says

    async def ReceiveTensors(self, stream, context):
        came = {name: tensor async for name, tensor in tensors(stream)}
        self.received.update(came)
        return kpu.TensorResponse(success=True, received_tensor_ids=list(came))

    async def StreamTensors(self, stream, context):
        async for name, tensor in tensors(stream):
            for c in chunks("processed_" + name, tensor):
                yield c


class Split(split_grpc.ComputeServiceServicer):
    def Compute(self, request, context):
        begin = time.perf_counter()
        x = torch.from_numpy(numpy.frombuffer(request.data, numpy.float32).reshape(list(request.shape)).copy())
        data = x.numpy().astype(numpy.float32).tobytes()
        return split.ComputeResponse(data=data, shape=x.shape, compute_time_ms=(time.perf_counter() - begin) * 1e3)


async def serve():
    server = grpc.aio.server()
    kpu_grpc.add_ServiceServicer_to_server(Kpu(), server)
    other = grpc.server(futures.ThreadPoolExecutor(10), options=LARGE)
    split_grpc.add_ComputeServiceServicer_to_server(Split(), other)
    ports = server.add_insecure_port("127.0.0.1:0"), other.add_insecure_port("127.0.0.1:0")
    await server.start()
    other.start()
    print(*(f"127.0.0.1:{port}" for port in ports), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(1)
    other.stop(1)


class Client:
    @functools.cache  # noqa: B019
    def stub(self, address, kind):
        aio = kind is kpu_grpc.ServiceStub
        return kind(grpc.aio.insecure_channel(address) if aio else grpc.insecure_channel(address, options=LARGE))

    async def kpu_upload(self, address, x):
        answer = await self.stub(address, kpu_grpc.ServiceStub).ReceiveTensors(chunks(str(uuid.uuid4()), x))
        assert answer.success and len(answer.received_tensor_ids) == 1, answer

    async def kpu_echo(self, address, x):
        stream = self.stub(address, kpu_grpc.ServiceStub).StreamTensors(chunks(str(uuid.uuid4()), x))
        got = [y async for _, y in tensors(stream)]
        assert len(got) == 1 and got[0].shape == x.shape and got[0][-1] == x[-1]

    async def split_echo(self, address, x):
        request = split.ComputeRequest(data=x.numpy().astype(numpy.float32).tobytes(), shape=x.shape)
        answer = self.stub(address, split_grpc.ComputeServiceStub).Compute(request, timeout=60)
        y = torch.from_numpy(numpy.frombuffer(answer.data, numpy.float32).reshape(list(answer.shape)).copy())
        assert y.shape == x.shape and y[-1] == x[-1]


async def client():
    c = Client()
    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        what, address, size, count = line.split()
        x = torch.rand(int(size) // 4)
        took, own = [], time.process_time()
        for _ in range(int(count)):
            begin = time.perf_counter()
            await getattr(c, what)(address, x)
            took.append(time.perf_counter() - begin)
        print(json.dumps({"seconds": took, "own": (time.process_time() - own) / len(took)}), flush=True)


asyncio.run({"server": serve, "client": client}[sys.argv[1]]())
