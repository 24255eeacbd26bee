"""The processes of the benchmark of training: python ends.py KIND [ADDRESS].

A client reads lines such as "split 40", does so many steps, and answers with JSON. A server
prints its address. All end with their input.
"""

import json
import shutil
import statistics
import subprocess
import sys
import time
import types
from contextlib import nullcontext

import torch
from common import answer, join, rpc_server
from models import ROWS, WIDTH, Paused, Trunk, ends, small
from torch import nn

BATCH, MICRO = 64, 4
ROAD_MICRO = 8
PARTS = ("forward", "backward", "step")  # of a training round
torch.set_num_threads(1)


def batches(count):
    torch.manual_seed(4)
    return [(torch.randn(BATCH, 784), torch.randint(10, (BATCH,))) for _ in range(count)]


def steps(network, optimizers, count, finish=lambda: None, micro=1):
    """Take steps, of so many micro-batches each, and return what they took, with the last loss."""
    made = batches(count)
    begin = time.perf_counter()
    for x, y in made:
        for o in optimizers:
            o.zero_grad()
        total = 0.0
        for part, labels in zip(x.chunk(micro), y.chunk(micro)):
            loss = nn.functional.cross_entropy(network(part), labels) / micro
            loss.backward()
            total += loss.item()
        for o in optimizers:
            o.step()
    finish()
    return {"seconds": time.perf_counter() - begin, "loss": total}


def adam(*modules):
    return torch.optim.Adam([p for m in modules for p in m.parameters()], lr=1e-3)


def alone(count, micro=1):
    bottom, top = ends()
    network = nn.Sequential(bottom, Trunk(), top)
    return steps(network, [adam(network)], count, micro=micro)


def alone_micro(count):
    return alone(count, MICRO)


def p50(count, do):
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        do()
        times.append(time.perf_counter() - begin)
    return {"p50": statistics.median(times)}


class Watched:
    """A client that notes the calls of a RemoteModule: what each took until its result."""

    def __init__(self, client):
        self.client, self.calls, self._ends = client, [], set()
        self.models = client.models

    def call(self, path, *args, **more):
        begin = time.perf_counter()
        call = self.client.call(path, *args, **more)

        def result():
            said = call.result()
            self.calls.append((path.partition("/")[2], time.perf_counter() - begin, call.timings))
            watched.id = call.id
            return said

        watched = types.SimpleNamespace(result=result)
        return watched


class Ferry:
    """The trunk on a server of tensorferry."""

    def __init__(self, address):
        import tensorferry as tf
        from tensorferry.torch import RemoteModule, RemoteOptimizer

        self.client, self.address = tf.connect(address), address
        self.remote, self.optimizer = RemoteModule, RemoteOptimizer
        self.small = small()
        self.fresh = Trunk().state_dict()

    def call(self, count):
        x = torch.randn(ROWS, WIDTH)
        return p50(count, lambda: self.client.compute("change", x))

    def round(self, count, client=None, **how):
        trunk = self.remote(client or self.client, "small")
        optimizer = self.optimizer(trunk.parameters(), "sgd", lr=1e-3, **how)
        with trunk.training():
            return self.rounds(trunk, optimizer, count)

    def round_fused(self, count):
        return self.round(count, fused=True)

    def round_parts(self, count):
        """The p50 of each call of a round, and of its part in the worker."""
        watched, said = Watched(self.client), {}
        self.round(count, watched)
        for part in PARTS:
            noted = [c for c in watched.calls if c[0] == part]
            said[part] = statistics.median(c[1] for c in noted)
            said[part + " in worker"] = statistics.median(c[2].compute for c in noted)
        return said

    def round_alone(self, count):
        optimizer = torch.optim.SGD(self.small.parameters(), lr=1e-3)

        def step():
            optimizer.step()
            optimizer.zero_grad()

        return self.rounds(self.small, optimizer, count, step)

    def rounds(self, trunk, optimizer, count, step=None):
        h, g = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(ROWS, WIDTH)

        def do():
            trunk(h).backward(g)
            (step or optimizer.step)()

        return p50(count, do)

    def begin(self, client=None):
        """The parts of a network as they are at first."""
        bottom, top = ends()
        trunk = self.remote(client or self.client, "trunk")
        # An optimizer of other options is a new one: the server's forgets what it has.
        return bottom, trunk, top

    def split(self, count, fused=False, **how):
        bottom, trunk, top = self.begin()
        with trunk.training():
            trunk.load_state_dict(self.fresh)
            theirs = self.optimizer(self.forgetting(trunk), "adam", lr=1e-3, fused=fused)
            if how:
                plain = theirs.step
                theirs.step = lambda: plain(**how)
            return steps(nn.Sequential(bottom, trunk, top), [adam(bottom, top), theirs], count, lambda: trunk.step)

    def forgetting(self, trunk):
        """Parameters for an optimizer that begins anew: one of another kind has taken a step of nothing."""
        self.optimizer(trunk.parameters(), "sgd", lr=0.0).step()
        return trunk.parameters()

    def unwaited(self, count):
        return self.split(count, wait=False)

    def fused(self, count):
        return self.split(count, fused=True)

    def pipeline(self, count):
        bottom, trunk, top = self.begin()
        mine = adam(bottom, top)
        made = batches(count)
        with trunk.training():
            trunk.load_state_dict(self.fresh)
            theirs = self.optimizer(self.forgetting(trunk), "adam", lr=1e-3)
            begin = time.perf_counter()
            for x, y in made:
                mine.zero_grad()
                theirs.zero_grad()
                loss, labels = 0.0, y.chunk(MICRO)
                with trunk.pipeline(4) as through:
                    for i, h in enumerate(through(bottom(part) for part in x.chunk(MICRO))):
                        part = nn.functional.cross_entropy(top(h), labels[i]) / MICRO
                        part.backward()
                        loss += part.item()
                mine.step()
                theirs.step(wait=False)
            assert trunk.step
            return {"seconds": time.perf_counter() - begin, "loss": loss}

    def wire(self, count):
        """Bytes of a step: of tensors, and of TCP."""
        bottom, trunk, top = self.begin()
        with trunk.training():
            optimizers = [adam(bottom, top), self.optimizer(trunk.parameters(), "adam", lr=1e-3)]
            network = nn.Sequential(bottom, trunk, top)
            steps(network, optimizers, 1)
            before, tcp = self.client.statistics(), self.tcp()
            steps(network, optimizers, count)
            after, tcp_after = self.client.statistics(), self.tcp()
        tensors = (after.sent + after.received - before.sent - before.received) / count
        least = 4 * BATCH * 128 * 4  # two activations and two gradients, of float32
        return {"least": least, "tensors": tensors, "tcp": tcp and (tcp_after - tcp) / count}

    def tcp(self):
        """The bytes that connections to the server have carried, both ways; 0 where there is no ss."""
        if not shutil.which("ss"):
            return 0
        said = subprocess.run(
            ["ss", "-tinHO", "state", "established", "dst", self.address], capture_output=True, text=True, check=True
        ).stdout
        fields = [f.partition(":") for f in said.split()]
        return sum(int(n) for name, _, n in fields if name in ("bytes_acked", "bytes_received"))

    def where(self, count):
        """Where the time of a step goes, in seconds."""
        watched = Watched(self.client)
        bottom, trunk, top = self.begin(watched)
        with trunk.training():
            theirs = self.optimizer(trunk.parameters(), "adam", lr=1e-3)
            network, mine = nn.Sequential(bottom, trunk, top), adam(bottom, top)
            steps(network, [mine, theirs], 1)
            watched.calls.clear()
            took = steps(network, [mine, theirs], count)["seconds"]
            noted = [c for c in watched.calls if c[0] in PARTS]
        assert len(noted) == 3 * count, [c[0] for c in noted]
        calls = sum(seconds for _, seconds, _ in noted)
        total, receive, queue, compute = (
            sum(getattr(t, name) for *_, t in noted) for name in ("total", "receive", "queue", "compute")
        )
        parts = {
            "step": took, "client": took - calls, "wire": calls - total, "receive": receive, "queue": queue,
            "compute": compute, "rest": total - receive - queue - compute,
        }  # fmt: skip
        return {name: seconds / count for name, seconds in parts.items()}


def ferry(address):
    f = Ferry(address)
    works = (
        "call", "round", "round_fused", "round_alone", "round_parts", "split", "unwaited", "fused", "pipeline", "wire",
        "where",
    )  # fmt: skip
    answer({"alone": alone, "alone-micro": alone_micro, **{name.replace("_", "-"): getattr(f, name) for name in works}})
    f.client.close()


def rpc_client(address):
    """The trunk in another process, by torch.distributed.rpc."""
    import torch.distributed.autograd as dist_autograd
    from torch.distributed.nn import RemoteModule
    from torch.distributed.optim import DistributedOptimizer

    rpc = join(1, address)

    def train(count):
        bottom, top = ends()
        trunk = RemoteModule("end0/cpu", Trunk)
        mine = [rpc.RRef(p) for m in (bottom, top) for p in m.parameters()]
        optimizer = DistributedOptimizer(torch.optim.Adam, [*mine, *trunk.remote_parameters()], lr=1e-3)
        made = batches(count)
        begin = time.perf_counter()
        for x, y in made:
            with dist_autograd.context() as context:
                loss = nn.functional.cross_entropy(top(trunk(bottom(x))), y)
                dist_autograd.backward(context, [loss])
                optimizer.step(context)
        return {"seconds": time.perf_counter() - begin, "loss": loss.item()}

    answer({"rpc": train})
    rpc.shutdown()


def road(rounds, count, address):
    """Print the seconds of a step, by how it is taken."""
    import tensorferry as tf
    from tensorferry.torch import RemoteModule, RemoteOptimizer

    said = {}
    x = torch.randn(32, 1024)
    with tf.connect(address) as client:
        trunk = RemoteModule(client, "trunk")
        with trunk.training():

            def taken(depth, **how):
                """Take steps with a pipeline of a depth; of none, without a server."""
                network = Paused() if depth else nn.Sequential(Paused(), Paused())
                mine = torch.optim.SGD(network.parameters(), lr=1e-3)
                theirs = depth and RemoteOptimizer(trunk.parameters(), "sgd", lr=1e-3)
                begin = time.perf_counter()
                for _ in range(int(count)):
                    made = (network(x) for _ in range(ROAD_MICRO))
                    with trunk.pipeline(depth) if depth else nullcontext(iter) as through:
                        for h in through(made):
                            h.sum().backward()
                    mine.step()
                    if depth:
                        theirs.step(**how)
                    mine.zero_grad()
                assert trunk.step or not depth
                return (time.perf_counter() - begin) / int(count)

            for i in range(-1, int(rounds)):
                for name, do in (
                    ("alone", lambda: taken(0)),
                    ("1", lambda: taken(1)),
                    ("4", lambda: taken(4)),
                    (str(ROAD_MICRO), lambda: taken(ROAD_MICRO)),
                    ("unwaited", lambda: taken(ROAD_MICRO, wait=False)),
                ):
                    took = do()
                    if i >= 0:
                        said.setdefault(name, []).append(took)
    print(json.dumps(said))


KINDS = {"ferry": ferry, "rpc-server": rpc_server, "rpc": rpc_client, "road": road}

if __name__ == "__main__":
    KINDS[sys.argv[1]](*sys.argv[2:])
