"""A torch module on the GPU behind a server and in this process, and torch's matrix products."""

import mmap
import sys
import time

import torch

import tensorferry as tf
from tensorferry import _worker
from tensorferry.torch import RemoteModule, RemoteOptimizer

rehearsal = len(sys.argv) > 1
device = "cuda" if torch.cuda.is_available() else "cpu"
rows = 256 if rehearsal else 16384


def took(f, n=5):
    f()
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(n):
        f()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / n


torch.manual_seed(1)
module = torch.nn.Sequential(torch.nn.Linear(768, 3072), torch.nn.GELU(), torch.nn.Linear(3072, 768)).eval()
x, one = torch.randn(rows, 768), torch.randn(1, 768)
with torch.no_grad():
    want = module.double()(x.double())
    module.float().to(device)  # where it is served: otherwise a copy is
with tf.serve(module, port=0, name="mlp", rows="all_but_last") as server, tf.connect(server.address) as client:
    y = client.compute("mlp", x)
    print(f"torch module on {device} behind a server|error {float((y.double() - want).abs().max()):.1e}")

    def local():
        with torch.no_grad():
            return module(x.to(device)).cpu()

    there, here = took(lambda: client.compute("mlp", x)), took(local)
    print(f"{rows} rows of 768, behind a server, in this process|{there * 1e3:.1f} ms, {here * 1e3:.1f} ms")
    print(f"one row of 768 behind a server|{took(lambda: client.compute('mlp', one), 50) * 1e6:.0f} us")


# Blocks of 1 MiB, one after the other and overlapped, in turns: machines have slow moments.
def behind(blocks):
    _worker.BLOCKS = blocks
    with tf.serve(module, port=0, name="mlp", rows="all_but_last") as server, tf.connect(server.address) as client:
        return took(lambda: client.compute("mlp", x), times), client.compute("mlp", x)


times, most = 1 if rehearsal else 5, _worker.BLOCKS
alone, several = zip(*[(behind(1), behind(most)) for _ in range(1 if rehearsal else 3)])
equal = all(torch.equal(y, alone[0][1]) for _, y in alone + several)
best = ", ".join(f"{min(t for t, _ in all) * 1e3:.1f} ms" for all in (alone, several))
print(f"{rows} rows of 768, 1 block and {most} at a time|{best}; results {'equal' if equal else 'DIFFER'}")


# Training: bottom, trunk and top on the device, the trunk behind a server, and the same network unsplit.
def parts():
    torch.manual_seed(2)
    conv = torch.nn.Sequential(torch.nn.Conv2d(16, 32, 3, 2, 1), torch.nn.BatchNorm2d(32), torch.nn.ReLU())
    top = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(32 * 64, 10))
    return [part.to(device) for part in (torch.nn.Conv2d(3, 16, 3, 2, 1), conv, top)]


images, labels = torch.randn(256, 3, 32, 32, device=device), torch.randint(10, (256,), device=device)


def trained(network, optimizers, steps):
    losses = []
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(images), labels)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


torch.backends.cudnn.deterministic = True
torch.backends.cudnn.allow_tf32 = False
whole, (bottom, middle, top) = torch.nn.Sequential(*parts()), parts()
unsplit = [torch.optim.Adam(whole.parameters())]
with tf.serve(middle, port=0, name="trunk", train=True) as server, tf.connect(server.address) as client:
    trunk = RemoteModule(client, "trunk")
    with trunk.training():
        split = torch.nn.Sequential(bottom, trunk, top)
        adams = [
            torch.optim.Adam([*bottom.parameters(), *top.parameters()]),
            RemoteOptimizer(trunk.parameters(), "adam"),
        ]
        off = max(abs(a - b) for a, b in zip(trained(split, adams, 20), trained(whole, unsplit, 20)))
        weights = (middle[0].weight - whole[1][0].weight).abs().max().item()
        where = next(middle.parameters()).device
        print(f"training, trunk on {where}, 20 steps|losses off by {off:.1e}, weights by {weights:.1e}")
        there, here = took(lambda: trained(split, adams, 20)) / 20, took(lambda: trained(whole, unsplit, 20)) / 20
        print(f"a step of 256 images, split, unsplit|{there * 1e3:.2f} ms, {here * 1e3:.2f} ms")
if device == "cuda":
    for m, k, n in ((341, 768, 3072), (64, 4096, 4096)):
        for kind in ("float32", "tf32", "bfloat16"):
            torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
            dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
            a, w = (torch.randn(r, k, device="cuda").to(dtype) for r in (m, n))
            t = took(lambda a=a, w=w: torch.nn.functional.linear(a, w), 200)
            print(f"torch linear {m}x{k}x{n}, {kind}|{t * 1e6:.0f} us, {2e-12 * m * k * n / t:.1f} TFLOP/s")
    size = 64 << 20
    shared = mmap.mmap(-1, size)
    shared.write(b"x" * size)
    a, on = torch.frombuffer(shared, dtype=torch.float32), torch.empty(size // 4, device="cuda")
    for name in ("pageable", "registered"):
        if name == "registered":
            torch.cuda.cudart().cudaHostRegister(a.data_ptr(), size, 0)
        up, down = (
            size / took(f) / 1e9
            for f in (lambda: on.copy_(a, non_blocking=True), lambda: a.copy_(on, non_blocking=True))
        )
        print(f"torch, 64 MiB of shared memory, {name}|h2d {up:.1f}, d2h {down:.1f} GB/s")
    torch.cuda.cudart().cudaHostUnregister(a.data_ptr())
