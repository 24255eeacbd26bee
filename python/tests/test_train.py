"""A torch module on a server trains as if it stood in the user's own file."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import warnings
from typing import Any, Callable, Optional

import tensorferry as tf
from support import Server, eventually, needs_torch, program, torch

if torch is not None:
    from tensorferry.torch import RemoteModule, RemoteOptimizer, Rewound, clip_grad_norm_

    nn, F = torch.nn, torch.nn.functional

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.MultiheadAttention(16, 2, batch_first=True)
            self.norm = nn.LayerNorm(16)

        def forward(self, x: Any) -> Any:
            return self.norm(x + self.mix(x, x, x, need_weights=False)[0])

    class Tied(nn.Module):
        """Two layers of one weight."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: Any) -> Any:
            return self.b(torch.tanh(self.a(x)))

    class Words(nn.Module):
        """Takes integers, which have no gradient, beside what does."""

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 16)

        def forward(self, x: Any, words: Any) -> Any:
            return x * self.table(words)

    class Masked(nn.Module):
        """Takes a mask, or none."""

        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(16, 16)

        def forward(self, h: Any, mask: Any = None) -> Any:
            return self.a(h if mask is None else h * mask)

    class Two(nn.Module):
        """Two outputs, and one of integers."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Any) -> Any:
            return self.a(x), self.b(x), x.argmax(-1)

    class InPlace(nn.Module):
        """Modifies what its backward pass needs."""

        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(16, 16)

        def forward(self, x: Any) -> Any:
            y = self.a(x).exp()
            y.exp().add_(1)
            y.add_(1)
            return y

    class Spectrum(nn.Module):
        """Takes a real tensor, and has a complex output."""

        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(16, 16)

        def forward(self, x: Any) -> Any:
            return torch.fft.rfft(self.a(x))

    class Filtered(nn.Module):
        """Takes a complex tensor, and has a complex parameter."""

        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(16, dtype=torch.complex64))

        def forward(self, z: Any) -> Any:
            return torch.fft.ifft(z * self.w)

    class Begins(nn.Module):
        """Begins in place."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.shift = nn.Linear(16, 16), nn.Parameter(torch.ones(16))

        def forward(self, x: Any) -> Any:
            x += self.shift
            return self.a(torch.tanh(x))

    class Apart(nn.Module):
        """One output has a graph, one is detached, and the second input has no part in the first."""

        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(16, 16)

        def forward(self, x: Any, z: Any) -> Any:
            return self.a(x), self.a(z).detach()

    class Deep(nn.Module):
        """Has many parameters, of long names."""

        def __init__(self) -> None:
            super().__init__()
            for i in range(80):
                self.register_parameter(f"{i}_" + "a" * 100, nn.Parameter(torch.ones(3)))

        def forward(self, x: Any) -> Any:
            return x * sum(self.parameters())

    TRUNKS: dict[str, Callable[[], Any]] = {
        "mlp": lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)),
        "batch norm": lambda: nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16)),
        "layer norm": lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)),
        "dropout": lambda: nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 16)),
        "tied": Tied,
    }


def seeded(trunk: Any) -> Any:
    """The trunk as RemoteModule has it run: with a seed of its own for each pass."""

    class Seeded(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.trunk = trunk

        def forward(self, *xs: Any) -> Any:
            seed = int(torch.randint(2**62, ()))
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                return self.trunk(*xs)

    return Seeded()


class Case:
    """A model of three parts, data, and how it is trained; by itself, or with its trunk on a server."""

    def __init__(
        self,
        trunk: Any,
        kind: str = "adam",
        steps: int = 3,
        micro: int = 1,
        clip: Optional[float] = None,
        dtype: Any = None,
        bottom: Any = None,
        shape: tuple[int, ...] = (8, 16),
        **options: Any,
    ) -> None:
        torch.manual_seed(1)
        dtype = dtype or torch.float32
        self.bottom = (bottom or nn.Linear(16, 16)).to(dtype)
        self.top = nn.Linear(16, 4).to(dtype)
        self.trunk = trunk.to(dtype)
        self.kind, self.micro, self.clip, self.options = kind, micro, clip, {"lr": 0.01, **options}
        self.x = [[torch.randn(shape, dtype=dtype) for _ in range(micro)] for _ in range(steps)]
        self.y = [[torch.randint(4, shape[:-1]) for _ in range(micro)] for _ in range(steps)]

    def optimizer(self, params: Any) -> Any:
        kinds = {
            "sgd": torch.optim.SGD,
            "momentum": torch.optim.SGD,
            "adam": torch.optim.Adam,
            "adamw": torch.optim.AdamW,
        }
        return kinds[self.kind](params, **self.options)

    def loss(self, h: Any, y: Any) -> Any:
        return F.cross_entropy(self.top(h).flatten(0, -2), y.flatten())

    def alone(self) -> dict[str, Any]:
        """Train it by itself."""
        c = copy.deepcopy(self)
        trunk = seeded(c.trunk)
        mine = [*c.bottom.parameters(), *c.top.parameters()]
        ours, theirs = c.optimizer(mine), c.optimizer(c.trunk.parameters())
        torch.manual_seed(2)
        losses, gradients = [], []
        for xs, ys in zip(c.x, c.y):
            ours.zero_grad()
            theirs.zero_grad()
            for x, y in zip(xs, ys):
                given = x.clone().requires_grad_()
                loss = c.loss(trunk(c.bottom(given)), y)
                loss.backward()
                losses.append(loss.item())
                gradients.append(given.grad)
            if c.clip:
                torch.nn.utils.clip_grad_norm_([*mine, *c.trunk.parameters()], c.clip)
            ours.step()
            theirs.step()
        return c.said(losses, gradients, c.trunk.state_dict(), theirs)

    def served(self) -> Any:
        """The trunk on a server: in a process of its own where it draws random numbers, which torch has one row of."""
        if any(isinstance(m, nn.Dropout) for m in self.trunk.modules()):
            return Worker(trunk=self.trunk)
        return tf.serve(self.trunk, 0, name="trunk", train=True)

    def split(self, pipeline: int = 0, fused: bool = False, wait: bool = True) -> dict[str, Any]:
        """Train it with its trunk on a server."""
        c = copy.deepcopy(self)
        mine = [*c.bottom.parameters(), *c.top.parameters()]
        ours = c.optimizer(mine)
        with c.served() as server, tf.connect(server.address) as client:
            trunk = RemoteModule(client, "trunk")
            theirs = RemoteOptimizer(trunk.parameters(), c.kind, fused=fused, **c.options)
            torch.manual_seed(2)
            losses, gradients = [], []
            with trunk.training():
                for xs, ys in zip(c.x, c.y):
                    ours.zero_grad()
                    theirs.zero_grad()
                    given = [x.clone().requires_grad_() for x in xs]
                    if pipeline:
                        with trunk.pipeline(pipeline) as passes:
                            for i, h in enumerate(passes(c.bottom(x) for x in given)):
                                loss = c.loss(h, ys[i])
                                loss.backward()
                                losses.append(loss.item())
                    else:
                        for x, y in zip(given, ys):
                            loss = c.loss(trunk(c.bottom(x)), y)
                            loss.backward()
                            losses.append(loss.item())
                    gradients += [x.grad for x in given]
                    if c.clip:
                        clip_grad_norm_(mine, trunk, max_norm=c.clip)
                    ours.step()
                    theirs.step(wait=wait)
                state, optimizer = trunk.state_dict(), trunk.optimizer_state()
                assert held(client)["graphs"] == 0 and held(client)["lease"] == 1
        return c.said(losses, gradients, state, optimizer)

    def said(self, losses: Any, gradients: Any, state: Any, optimizer: Any) -> dict[str, Any]:
        if not isinstance(optimizer, dict):
            state_of = optimizer.state_dict()["state"]
            optimizer = {
                f"{i}.{k}": torch.as_tensor(v) for i, s in state_of.items() for k, v in s.items() if v is not None
            }
        return {
            "loss": torch.tensor(losses),
            **{f"gradient {i}": g for i, g in enumerate(gradients) if g is not None},
            **{f"trunk {k}": v for k, v in state.items()},
            **{f"optimizer {k}": v for k, v in optimizer.items()},
            **{f"bottom {k}": v for k, v in self.bottom.state_dict().items()},
            **{f"top {k}": v for k, v in self.top.state_dict().items()},
        }


def held(client: Any) -> dict[str, float]:
    """What the model keeps, as operators see it."""
    gauges = next(m for m in client.info()["models"] if m["name"] == "trunk")["gauges"]
    return {name.removeprefix("training_"): value for name, value in gauges.items()}


class Torch(unittest.TestCase):
    """Torch computes with one thread: it repeats itself then."""

    threads = 0

    @classmethod
    def setUpClass(cls) -> None:
        program()
        cls.threads = torch.get_num_threads()
        torch.set_num_threads(1)
        cls.addClassCleanup(torch.set_num_threads, cls.threads)

    def enter(self, context: Any) -> Any:
        made = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        return made

    def same(self, a: dict[str, Any], b: dict[str, Any]) -> None:
        self.assertEqual(list(a), list(b))
        for (name, x), y in zip(a.items(), b.values()):
            self.assertTrue(torch.equal(x, y), f"{name}: {x} and {y}")


@needs_torch
class Exact(Torch):
    """The gradients, the weights and the optimizer's state are those of the unsplit model, bit for bit."""

    def test_trunks(self) -> None:
        for name, trunk in TRUNKS.items():
            for steps in (1, 10):
                with self.subTest(name, steps=steps):
                    case = Case(trunk(), steps=steps)
                    self.same(case.split(), case.alone())

    def test_attention(self) -> None:
        case = Case(Attention(), shape=(2, 5, 16))
        self.same(case.split(), case.alone())

    def test_convolution(self) -> None:
        class Pictures(nn.Module):  # type: ignore[misc,name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.a, self.n, self.b = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 1, 3, padding=1)

            def forward(self, x: Any) -> Any:
                return self.b(torch.relu(self.n(self.a(x.unflatten(-1, (1, 4, 4)))))).flatten(1)

        case = Case(Pictures(), steps=10)
        self.same(case.split(), case.alone())

    def test_optimizers(self) -> None:
        for kind, options in {
            "sgd": {}, "momentum": {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
            "adam": {"betas": (0.8, 0.99)}, "adamw": {"weight_decay": 0.1},
        }.items():  # fmt: skip
            with self.subTest(kind):
                case = Case(TRUNKS["mlp"](), kind=kind, **options)
                self.same(case.split(), case.alone())

    def test_accumulation_and_pipelines(self) -> None:
        for name in ("batch norm", "dropout"):
            case = Case(TRUNKS[name](), micro=4)
            alone = case.alone()
            for depth in (0, 1, 4):
                with self.subTest(name, depth=depth):
                    self.same(case.split(depth), alone)

    def test_float64(self) -> None:
        case = Case(TRUNKS["mlp"](), dtype=torch.float64, steps=10)
        self.same(case.split(), case.alone())

    def test_steps_that_go_with_a_pass(self) -> None:
        for name in ("batch norm", "dropout"):
            for kind in ("momentum", "adam"):
                case = Case(TRUNKS[name](), kind=kind, steps=5, **({"momentum": 0.9} if kind == "momentum" else {}))
                alone = case.alone()
                for how in ({"fused": True}, {"wait": False}, {"wait": False, "pipeline": 2}):
                    with self.subTest(name, kind=kind, **how):
                        self.same(case.split(**how), alone)

    def test_clipping_by_norm_over_both_sides(self) -> None:
        case = Case(TRUNKS["mlp"](), clip=0.05)
        split, alone = case.split(), case.alone()
        for name in alone:  # the norm is a sum of two sums
            torch.testing.assert_close(split[name], alone[name], rtol=1e-5, atol=1e-7, msg=name)


class Losing:
    """A client of which calls, or their answers, are lost."""

    def __init__(self, client: Any) -> None:
        self.client, self.parts, self.lost = client, list[str](), list[tuple[str, str]]()
        self.after: Callable[[], Any] = lambda: None  # of something lost

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def call(self, path: str, *args: Any, **more: Any) -> Any:
        part = path.partition("/")[2]
        self.parts.append(part)
        if not self.lost or self.lost[0][0] != part:
            return self.client.call(path, *args, **more)
        if self.lost.pop(0)[1] == "answer":
            self.client.call(path, *args, **more).result()
        self.after()
        return Lost()


class Lost:
    def result(self) -> Any:
        raise tf.Unavailable("lost")


class Served(Torch):
    """A server of this process."""

    def serve(self, trunk: Any, **more: Any) -> tuple[Any, Any]:
        server = self.enter(tf.serve(trunk, 0, name="trunk", train=True, **more))
        client = self.enter(tf.connect(server.address))
        return client, RemoteModule(client, "trunk")


@needs_torch
class Passes(Served):
    """One module, and what may happen to its passes."""

    def test_gradcheck_passes_and_leaves_no_graph(self) -> None:
        client, trunk = self.serve(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double())
        x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
        with trunk.training(), trunk.retain_graph():
            self.assertTrue(torch.autograd.gradcheck(trunk, (x,)))
            gc.collect()
            trunk.release()
            eventually(lambda: held(client)["graphs"] == 0)

    def test_several_outputs_of_which_one_is_used(self) -> None:
        module = Two()
        _client, trunk = self.serve(copy.deepcopy(module), outputs=("a", "b", "place"))
        x = torch.randn(4, 16, requires_grad=True)
        want = torch.autograd.grad(module(x)[1].square().sum(), x)[0]
        with trunk.training():
            a, b, place = trunk(x)
            self.assertFalse(place.requires_grad)
            self.assertTrue(a.requires_grad)
            b.square().sum().backward()
        self.assertTrue(torch.equal(x.grad, want))

    def test_inputs_without_a_gradient(self) -> None:
        module = Words()
        _client, trunk = self.serve(copy.deepcopy(module))
        x, words = torch.randn(4, 16, requires_grad=True), torch.tensor([1, 2, 3, 1])
        want = torch.autograd.grad(module(x, words).sum(), [x, module.table.weight])
        with trunk.training():
            trunk(x, words).sum().backward()
            self.assertTrue(torch.equal(x.grad, want[0]))
            optimizer = RemoteOptimizer(trunk.parameters(), "sgd", lr=1.0)
            optimizer.step()
            moved = module.table.weight.detach() - trunk.state_dict()["table.weight"]
            torch.testing.assert_close(moved, want[1])
            trunk(x.detach(), words=words).sum().backward()  # the trunk's gradients alone
            self.assertGreater(trunk.grad_norm()[0], 0)

    def test_an_input_that_is_left_out(self) -> None:
        module = Masked()
        _client, trunk = self.serve(copy.deepcopy(module))
        h, mask = torch.randn(4, 16, requires_grad=True), torch.rand(4, 16, requires_grad=True)
        with trunk.training():
            for given, named in ((), {}), ((None,), {}), ((), {"mask": None}), ((mask,), {}), ((), {"mask": mask}):
                said, xs = trunk(h, *given, **named), [h, mask] if mask in (*given, *named.values()) else [h]
                want = module(h, *given, **named)
                self.assertTrue(torch.equal(said, want))
                for a, b in zip(torch.autograd.grad(said.sum(), xs), torch.autograd.grad(want.sum(), xs)):
                    self.assertTrue(torch.equal(a, b))
            with self.assertRaisesRegex(TypeError, "has the inputs x, mask; given were mask"):
                trunk(mask=mask)
        with torch.no_grad():
            self.assertTrue(torch.equal(trunk.eval()(h), module(h)))

    def test_memory_of_a_kept_input_is_not_used_again(self) -> None:
        module = nn.Linear(16, 16)
        client, trunk = self.serve(copy.deepcopy(module))
        x = torch.randn(64, 16, requires_grad=True)
        want = torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()])
        with trunk.training():
            loss = trunk(x).square().sum()
            poison = torch.full((64, 16), float("nan"))
            for _ in range(30):
                client.compute("trunk", poison)
            loss.backward()
            self.assertTrue(torch.equal(x.grad, want[0]))
            RemoteOptimizer(trunk.parameters(), "sgd", lr=1.0).step()
            self.assertTrue(torch.equal(trunk.state_dict()["weight"], module.weight - want[1]))

    def test_complex_tensors_have_the_gradients_of_the_unsplit_model(self) -> None:
        for kind in (torch.float32, torch.complex64):
            module: Any = Filtered() if kind.is_complex else Spectrum()
            _client, trunk = self.serve(copy.deepcopy(module))
            x = torch.randn(4, 16, dtype=kind, requires_grad=True)
            module(x).abs().sum().backward()
            want, x.grad = x.grad, None
            ours = torch.optim.Adam(module.parameters(), lr=0.1)
            with self.subTest(kind), trunk.training():
                trunk(x).abs().sum().backward()
                self.assertTrue(torch.equal(x.grad, want))
                norm = float(nn.utils.clip_grad_norm_(module.parameters(), 1e9))
                self.assertAlmostEqual(trunk.grad_norm()[0] / norm, 1, places=5)
                self.assertAlmostEqual(clip_grad_norm_(module.parameters(), max_norm=1e9) / norm, 1, places=5)
                theirs = RemoteOptimizer(trunk.parameters(), "adam", lr=0.1)
                if kind.is_complex:
                    with self.assertRaisesRegex(tf.InvalidArgument, "have no order"):
                        theirs.step(clip_value=0.1)
                theirs.step()
                ours.step()
                self.same(trunk.state_dict(), dict(module.state_dict()))
                x.grad = None
                with trunk.pipeline(2) as passes:
                    for y in passes([x]):
                        y.abs().sum().backward()
                self.assertGreater(float(x.grad.abs().sum()), 0)

    def test_the_cut_is_neither_a_leaf_nor_a_view(self) -> None:
        module = Begins()
        bottom, top = nn.Linear(16, 16), nn.Linear(16, 4)

        def loss(h: Any) -> Any:
            h += 1
            return top(torch.relu_(h)).square().sum()

        xs = [torch.randn(4, 16) for _ in range(3)]
        for x in xs:
            loss(module(bottom(x))).backward()
        want = [p.grad.clone() for p in bottom.parameters()]
        _client, trunk = self.serve(copy.deepcopy(module))
        with trunk.training():
            for depth in (0, 2):
                bottom.zero_grad()
                if depth:
                    with trunk.pipeline(depth) as passes:
                        for h in passes(bottom(x) for x in xs):
                            loss(h).backward()
                else:
                    for x in xs:
                        loss(trunk(bottom(x))).backward()
                for p, g in zip(bottom.parameters(), want):
                    self.assertTrue(torch.equal(p.grad, g), depth)
            with torch.no_grad():
                h = trunk(xs[0])
            h += top.weight.sum()
            self.assertTrue(h.requires_grad)

    def test_what_has_no_graph_there_has_none_here(self) -> None:
        module = Apart()
        _client, trunk = self.serve(copy.deepcopy(module), outputs=("a", "b"))
        x, z = torch.randn(4, 16, requires_grad=True), torch.randn(4, 16, requires_grad=True)
        with trunk.training():
            a, b = trunk(x, z)
            self.assertTrue(a.requires_grad)
            self.assertFalse(b.requires_grad)
            a.sum().backward()
            self.assertIsNone(z.grad)
            self.assertIsNotNone(x.grad)
            with self.assertRaisesRegex(RuntimeError, "not have been used"):
                torch.autograd.grad(trunk(x, z)[0].sum(), z)
            with trunk.pipeline(2) as passes:
                for a, b in passes([(x, z)]):
                    self.assertFalse(b.requires_grad)
                    a.sum().backward()
            self.assertIsNone(z.grad)
            trunk.requires_grad_(False)
            self.assertFalse(trunk(x.detach(), z)[0].requires_grad)

    def test_the_names_of_many_parameters_travel(self) -> None:
        module = Deep()
        client, trunk = self.serve(copy.deepcopy(module))

        def groups(m: Any) -> Any:
            return [{"params": [p], "lr": 0.01 * (i + 1)} for i, p in enumerate(m.parameters())]

        theirs, ours = RemoteOptimizer(groups(trunk), "adamw"), torch.optim.AdamW(groups(module))
        self.assertGreater(len(str(theirs._groups())), 8 << 10)
        names = list(dict(trunk.named_parameters()))
        with trunk.training():
            for step in range(5):
                if step == 3:
                    RemoteOptimizer(trunk.parameters(), fused=True)
                    trunk._fused = theirs  # with its state
                for name, handle in trunk.named_parameters():
                    handle.requires_grad_(step != 1 or name == names[3])
                for part, optimizer in ((trunk, theirs), (module, ours)):
                    optimizer.zero_grad(set_to_none=True)
                    for name, p in part.named_parameters() if part is module else ():
                        p.requires_grad_(step != 1 or name == names[3])
                    part(torch.ones(2, 3)).sum().backward()
                    optimizer.step(**({"wait": step != 2} if part is trunk else {}))
            self.same(trunk.state_dict(), dict(module.state_dict()))
            octets = torch.zeros(1 << 20, dtype=torch.uint8)
            for part, port in (("forward", "/lists"), ("apply", "groups")):
                for wrong in (octets, octets[:2], torch.tensor(list(b'{"needs": 1}'), dtype=torch.uint8)):
                    given = {port: wrong} if part == "apply" else {"x": torch.ones(2, 3), port: wrong}
                    said = {"lease": trunk._token, **({"n": 6} if part == "apply" else {})}
                    with self.assertRaisesRegex(tf.InvalidArgument, "as JSON"):
                        client.call("trunk/" + part, given, params=said, like="torch").result()
            said = {"lease": trunk._token}
            call = client.call(
                "trunk/train", {"x": torch.ones(2, 3)}, params={**said, "needs": "", "frozen": names[0]}, like="torch"
            )
            self.assertEqual(call.result()["y"].shape, (2, 3))
            given = {"forward": call.id, "unused": "", **said}
            client.call("trunk/backward", {"y": torch.ones(2, 3)}, params=given, like="torch").result()
            params = {"n": 6, "passes": 1, "groups": '[{"lr": 1.0}]', **said}
            client.call("trunk/step", {}, params=params, like="torch").result()
            moved = [n for n, v in trunk.state_dict().items() if not torch.equal(v, module.state_dict()[n])]
            self.assertEqual(moved, names[1:])

    def test_numbers_that_are_none_are_refused_before_a_step(self) -> None:
        client, trunk = self.serve(nn.Linear(3, 3))
        nan, inf = float("nan"), float("inf")
        with trunk.training():
            trunk(torch.ones(2, 3)).sum().backward()
            before, norm = trunk.state_dict(), trunk.grad_norm()
            for kind, options, more in (
                ("sgd", {"lr": nan}, {}), ("sgd", {"lr": inf}, {}), ("sgd", {"lr": 10**3000}, {}), ("sgd", {"lr": 1e39}, {}),
                ("adam", {"lr": 1e38}, {}), ("adam", {"betas": (nan, 0.9)}, {}), ("adam", {"eps": nan}, {}),
                ("adamw", {"weight_decay": nan}, {}), ("momentum", {"momentum": nan}, {}), ("sgd", {"dampening": inf}, {}),
                ("sgd", {}, {"scale": nan}), ("sgd", {}, {"scale": 1e40}), ("sgd", {}, {"clip_value": nan}),
                ("sgd", {}, {"clip_value": -1.0}),
            ):  # fmt: skip
                with self.subTest(kind, **options, **more):
                    optimizer = RemoteOptimizer(trunk.parameters(), kind, lr=0.1)
                    optimizer.param_groups[0].update(options)
                    trunk._scale = 0.5  # of clip_grad_norm_
                    with self.assertRaises(tf.InvalidArgument):
                        optimizer.step(**more)
                    self.assertEqual((trunk._scale, trunk.step, trunk.grad_norm()), (0.5, 0, norm))
                    self.same(trunk.state_dict(), before)
            for groups in ("[" * 2000 + "]" * 2000, '[{"lr": 1e999}]', '[{"lr": NaN}]', '[{"lr": [[1]]}]'):
                for part in ("step", "apply"):
                    said = {"lease": trunk._token, "n": 1, **({"groups": groups} if part == "step" else {})}
                    octets = torch.tensor(list(groups.encode()), dtype=torch.uint8)
                    with self.subTest(part, groups=groups[:20]), self.assertRaises(tf.InvalidArgument):
                        client.call(
                            "trunk/" + part, {"groups": octets} if part == "apply" else {}, params=said, like="torch"
                        ).result()
            with self.assertRaises(ValueError):
                clip_grad_norm_([], trunk, max_norm=nan)
            RemoteOptimizer(trunk.parameters(), "sgd", lr=0.1).step()
            self.assertEqual(trunk.step, 1)

    def test_what_has_no_memory_is_refused(self) -> None:
        client, trunk = self.serve(nn.Linear(3, 3))
        freed = torch.ones(2, 3, requires_grad=True)
        turned, part = freed.detach().t(), freed.detach()[1:]
        state = {name: torch.ones(3) for name in ("weight", "bias")}
        for x in (freed, state["bias"]):
            (x.untyped_storage() if hasattr(x, "untyped_storage") else x.storage()).resize_(0)
        with trunk.training():
            for refused in (
                lambda: trunk(freed), lambda: trunk.load_state_dict(state), lambda: client.push({"w": turned}),
                lambda: client.call("trunk", {"x": freed}), lambda: client.call("trunk", {"x": part}),
            ):  # fmt: skip
                with self.assertRaisesRegex(TypeError, "memory was freed"):
                    refused()
            with torch.no_grad(), self.assertRaisesRegex(TypeError, "memory was freed"):
                trunk(freed)
            self.assertEqual(trunk(torch.ones(2, 3)).shape, (2, 3))

    def test_a_model_may_bring_its_own_passes_and_step(self) -> None:
        class Signs(tf.Trainer):  # type: ignore[name-defined,misc]
            """Moves each parameter by the sign of its gradient, and doubles the output."""

            def forward(self, x: Any) -> Any:
                return 2 * self.module(x)

            def step(self, options: Any) -> None:
                for p in self.module.parameters():
                    p.sub_(options["groups"][0]["lr"] * p.grad.sign())

        module = nn.Linear(3, 3)
        _client, trunk = self.serve(Signs(copy.deepcopy(module)))
        x = torch.rand(2, 3)
        with trunk.training():
            y = trunk(x)
            self.assertTrue(torch.equal(y, 2 * module(x)))
            y.sum().backward()
            RemoteOptimizer(trunk.parameters(), "sgd", lr=0.5).step()
            self.assertTrue(torch.equal(trunk.state_dict()["weight"], module.weight - 0.5))

    def test_parameters_that_are_frozen(self) -> None:
        module = nn.Linear(3, 3)
        _client, trunk = self.serve(copy.deepcopy(module))
        x = torch.randn(2, 3, requires_grad=True)
        want = torch.autograd.grad(module(x).sum(), x)[0]
        with trunk.training():
            trunk.requires_grad_(False)
            trunk(x).sum().backward()
            self.assertTrue(torch.equal(x.grad, want))
            self.assertEqual(trunk.grad_norm(), (0.0, True))
            trunk.zero_grad()
            trunk.requires_grad_(True)
            trunk(x).sum().backward()
            self.assertGreater(trunk.grad_norm()[0], 0)

    def test_a_part_of_a_module_of_this_process(self) -> None:
        _client, trunk = self.serve(nn.Linear(3, 3))
        whole = nn.Sequential(nn.Linear(3, 3), trunk).to("cpu").train()
        self.assertEqual(len(list(whole[0].parameters())), len(list(whole.parameters())))
        with trunk.training():
            state = whole.state_dict()
            self.assertEqual(list(state), ["0.weight", "0.bias", "1.weight", "1.bias"])
            other = {name: torch.randn(x.shape) for name, x in state.items()}
            whole.load_state_dict(other)
            self.same(trunk.state_dict(), {"weight": other["1.weight"], "bias": other["1.bias"]})
        with self.assertRaisesRegex(TypeError, "not copied"):
            copy.deepcopy(trunk)
        with self.assertRaisesRegex(NotImplementedError, "leave strict"):
            trunk.load_state_dict({}, strict=False)

    def test_gradients_whose_answer_was_lost_void_the_step(self) -> None:
        _client, trunk = self.serve(nn.Linear(3, 3))
        optimizer = RemoteOptimizer(trunk.parameters())
        with trunk.training():
            trunk(torch.randn(2, 3)).sum().backward()
            trunk._passes = 0  # as if this side had not heard of it
            with self.assertRaisesRegex(tf.FailedPrecondition, "of 1 backward passes, the client had 0 confirmed"):
                optimizer.step()
            optimizer.zero_grad()
            trunk(torch.randn(2, 3)).sum().backward()
            optimizer.step(scale=0.5, clip_value=0.1)
            self.assertEqual(trunk.step, 1)

    def test_a_step_that_is_not_waited_for(self) -> None:
        _client, trunk = self.serve(nn.Linear(3, 3))
        optimizer = RemoteOptimizer(trunk.parameters(), "momentum")
        with trunk.training():
            for _ in range(3):
                trunk(torch.randn(2, 3)).sum().backward()
                optimizer.step(wait=False)
            self.assertEqual(trunk.step, 3)
            trunk(torch.randn(2, 3)).sum().backward()
            optimizer._kind = "rprop"
            optimizer.step(wait=False)
            with self.assertRaisesRegex(tf.InvalidArgument, "no optimizer"):
                trunk(torch.randn(2, 3))
            self.assertEqual(trunk.grad_norm()[1], True)
            optimizer._kind = "momentum"
            optimizer.step()  # the gradients are there
            self.assertEqual(trunk.step, 4)

    def test_a_step_rides_on_the_next_forward_pass(self) -> None:
        client, _ = self.serve(nn.Linear(3, 3))
        trunk = RemoteModule(Losing(client), "trunk")
        optimizer = RemoteOptimizer(trunk.parameters(), lr=0.1)
        with trunk.training():
            trunk._client.parts.clear()
            for _ in range(3):
                trunk(torch.randn(2, 3)).sum().backward()
                optimizer.step(wait=False)
            self.assertEqual(trunk._client.parts, ["forward", "backward"] * 3)
            self.assertEqual(trunk.step, 3)
            self.assertEqual(trunk._client.parts[6:], ["step"])

    def test_whatever_comes_after_a_step_sends_it_and_has_its_error(self) -> None:
        x = torch.randn(2, 3)

        def evaluate(trunk: Any) -> None:
            trunk.eval()
            trunk(x)

        def pass_in_a_pipeline(trunk: Any) -> None:
            with trunk.pipeline(2) as passes:
                for h in passes([x, x, x]):
                    h.sum().backward()

        uses: dict[str, Callable[[Any], Any]] = {
            "forward": lambda trunk: trunk(x), "no_grad": torch.no_grad()(lambda trunk: trunk(x)), "eval": evaluate,
            "pipeline": pass_in_a_pipeline, "state_dict": lambda trunk: trunk.state_dict(),
            "optimizer_state": lambda trunk: trunk.optimizer_state(), "grad_norm": lambda trunk: trunk.grad_norm(),
            "step": lambda trunk: trunk.step, "load_state_dict": lambda trunk: trunk.load_state_dict(nn.Linear(3, 3).state_dict()),
            "another step": lambda trunk: RemoteOptimizer(trunk.parameters()).step(),
            "close": lambda trunk: trunk._client.close(), "end": lambda trunk: None,
        }  # fmt: skip
        for name, use in uses.items():
            for kind in ("sgd", "rprop"):
                with self.subTest(name, kind=kind):
                    server = self.enter(tf.serve(nn.Linear(3, 3), 0, name="trunk", train=True))
                    trunk = RemoteModule(self.enter(tf.connect(server.address)), "trunk")
                    other = RemoteModule(self.enter(tf.connect(server.address)), "trunk")
                    optimizer = RemoteOptimizer(trunk.parameters(), lr=0.1)
                    optimizer._kind = kind
                    with contextlib.ExitStack() as stack:
                        if kind == "rprop":
                            stack.enter_context(self.assertRaisesRegex(tf.InvalidArgument, "no optimizer"))
                        with trunk.training():
                            trunk(x).sum().backward()
                            optimizer.step(wait=False)
                            self.assertEqual(held(other._client)["step"], 0)
                            use(trunk)
                    steps = kind == "sgd" and (2 if name == "another step" else 1)
                    self.assertEqual(held(other._client)["step"], steps)

    def test_a_step_that_is_left_by_an_exception_is_sent(self) -> None:
        client, trunk = self.serve(nn.Linear(3, 3))
        with self.assertRaisesRegex(ZeroDivisionError, "mine"), trunk.training():
            trunk(torch.randn(2, 3)).sum().backward()
            RemoteOptimizer(trunk.parameters(), lr=0.1).step(wait=False)
            raise ZeroDivisionError("mine")
        self.assertEqual(held(client)["step"], 1)

    def test_a_graph_of_before_a_step_that_was_not_sent_is_refused(self) -> None:
        _client, trunk = self.serve(nn.Linear(3, 3))
        with trunk.training():
            old = trunk(torch.randn(2, 3)).sum()
            trunk(torch.randn(2, 3)).sum().backward()
            RemoteOptimizer(trunk.parameters(), lr=0.1).step(wait=False)
            with self.assertRaisesRegex(tf.FailedPrecondition, "step 1 came after it"):
                old.backward()

    def lossy(self, fused: bool) -> tuple[Any, Any, Any, Any]:
        module = nn.Linear(3, 3)
        client, _ = self.serve(copy.deepcopy(module))
        trunk = RemoteModule(Losing(client), "trunk")
        theirs = RemoteOptimizer(trunk.parameters(), "momentum", lr=0.1, fused=fused)
        return trunk, theirs, module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

    def taken(self, middle: Any, optimizer: Any, **how: Any) -> Any:
        """The gradient of a step's input."""
        h = torch.ones(2, 3, requires_grad=True)
        optimizer.zero_grad()
        middle(h).square().sum().backward()
        optimizer.step(**how)
        return h.grad

    def test_lost_answers_of_a_pass_that_a_step_rides_on(self) -> None:
        for text in ("call", "answer", "answer answer", "call answer", "answer call", "call call"):
            how = text.split()
            trunk, theirs, module, ours = self.lossy(False)
            with self.subTest(how=how), trunk.training():
                for i in range(4):
                    trunk._client.lost = [("forward", kind) for kind in how] if i in (1, 2) else []
                    want = self.taken(module, ours)
                    for _ in range(3):
                        try:
                            self.assertTrue(torch.equal(self.taken(trunk, theirs, wait=False), want))
                            break
                        except tf.Unavailable:
                            if trunk._passes:  # the step did not come there, and its gradients are there
                                theirs.step(wait=False)
                self.assertEqual(trunk.step, 4)
                self.same(trunk.state_dict(), dict(module.state_dict()))

    def test_lost_answers_of_a_pass_with_a_step(self) -> None:
        for how in (("call",), ("answer",), ("answer", "answer"), ("answer", "call")):
            trunk, theirs, module, ours = self.lossy(True)
            with self.subTest(how=how), trunk.training():
                for i in range(4):
                    trunk._client.lost = [("backward", kind) for kind in how] if i in (1, 2) else []
                    want = self.taken(module, ours)
                    if i in (1, 2) and how == ("call",):  # nothing came there: the batch again
                        with self.assertRaises(tf.Unavailable):
                            self.taken(trunk, theirs)
                    elif i in (1, 2) and len(how) == 2:  # the step stands, and this side will not hear of its gradients
                        with self.assertRaises(tf.Unavailable):
                            self.taken(trunk, theirs)
                        with self.assertRaises(Rewound) as caught:
                            theirs.zero_grad()
                        self.assertEqual((caught.exception.step, trunk.step), (i + 1, i + 1))
                        continue
                    self.assertTrue(torch.equal(self.taken(trunk, theirs), want))
                self.assertEqual(trunk.step, 4)
                self.same(trunk.state_dict(), dict(module.state_dict()))

    def test_a_step_of_which_nothing_is_heard_is_not_forgotten(self) -> None:
        rides = (("step", False, True), ("forward", False, False), ("backward", True, True))
        for (part, fused, wait), lost, leave in itertools.product(rides, ("call", "answer"), (False, True)):
            trunk, theirs, module, ours = self.lossy(fused)
            want = self.taken(module, ours)
            with self.subTest(part, lost=lost, leave=leave), contextlib.ExitStack() as stack:
                with self.assertRaises(tf.Unavailable), contextlib.ExitStack() as first:
                    (first if leave else stack).enter_context(trunk.training())
                    losses = [(part, lost), ("lease", "call")]
                    trunk._client.lost = losses if wait else []
                    self.taken(trunk, theirs, wait=wait)
                    trunk._client.lost = losses
                    trunk(torch.ones(2, 3))
                self.assertEqual((trunk._client.lost, trunk._step), ([], 0))
                if not leave:
                    with self.assertRaisesRegex(tf.FailedPrecondition, "not confirmed"):
                        trunk._next("sgd", [{}])
                if lost == "answer":
                    with self.assertRaisesRegex(Rewound, "stands at step 1, this client at 0"):
                        if leave:
                            stack.enter_context(trunk.training())
                        theirs.zero_grad()
                if leave:
                    stack.enter_context(trunk.training())
                if lost == "call":
                    self.assertTrue(torch.equal(self.taken(trunk, theirs), want))
                want = self.taken(module, ours)
                self.assertTrue(torch.equal(self.taken(trunk, theirs), want))
                self.assertEqual(trunk.step, 2)
                self.same(trunk.state_dict(), dict(module.state_dict()))

    def test_all_that_comes_before_the_end_of_a_client_is_tried(self) -> None:
        client, _ = self.serve(nn.Linear(3, 3))
        tried = []

        def fails(name: str) -> None:
            tried.append(name)
            raise tf.Unavailable(name)

        client._ends.update(functools.partial(fails, name) for name in "ab")
        with self.assertRaises(tf.Unavailable) as caught:
            client.close()
        self.assertEqual(sorted(tried), ["a", "b"])
        self.assertIn(str(caught.exception), "ab")
        client.close()

    def test_a_fused_pass_that_is_interrupted(self) -> None:
        trunk, theirs, module, ours = self.lossy(True)
        with trunk.training():
            self.taken(trunk, theirs)
            trunk._client.lost = [("backward", "answer")]
            trunk._client.after = lambda: signal.raise_signal(signal.SIGINT)
            with self.assertRaises(KeyboardInterrupt):
                self.taken(trunk, theirs)
            with self.assertRaisesRegex(Rewound, "stands at step 2, this client at 1"):
                self.taken(trunk, theirs)
            for _ in range(3):
                want = self.taken(module, ours)
            self.assertTrue(torch.equal(self.taken(trunk, theirs), want))

    def test_a_fused_step_is_of_one_backward_pass(self) -> None:
        _client, trunk = self.serve(nn.Linear(3, 3))
        x = torch.randn(2, 3, requires_grad=True)
        optimizer = RemoteOptimizer(trunk.parameters(), lr=0.1, fused=True)
        with trunk.training():
            trunk(x).sum().backward()
            self.assertEqual(trunk.step, 1)
            with self.assertRaisesRegex(tf.FailedPrecondition, "does not go with accumulated gradients"):
                trunk(x).sum().backward()
            optimizer.step()
            torch.autograd.grad(trunk(x).sum(), x)  # of the input alone
            self.assertEqual(trunk.step, 1)
            optimizer.zero_grad()
            trunk(x).sum().backward()
            optimizer.zero_grad()  # in place of a step, which has been taken
            trunk(x).sum().backward()
            self.assertEqual(trunk.step, 3)
            for wrong in ({"scale": 0.5}, {"clip_value": 0.1}):
                with self.assertRaisesRegex(tf.FailedPrecondition, "scaled or clipped"):
                    optimizer.step(**wrong)
            with self.assertRaisesRegex(tf.FailedPrecondition, "clipped gradients"):
                clip_grad_norm_([], trunk, max_norm=1.0)
            with self.assertRaisesRegex(tf.FailedPrecondition, "retained graphs"), trunk.retain_graph():
                pass
            with self.assertRaisesRegex(tf.FailedPrecondition, "a pipeline"), trunk.pipeline(2):
                pass
            plain = RemoteOptimizer(trunk.parameters(), lr=0.1)
            for _ in range(2):
                trunk(x).sum().backward()
            plain.step(scale=0.5)
            self.assertEqual(trunk.step, 4)

    def test_a_fused_step_with_wrong_options_leaves_everything(self) -> None:
        _client, trunk = self.serve(nn.Linear(3, 3))
        optimizer = RemoteOptimizer(trunk.parameters(), lr=0.1, fused=True)
        with trunk.training():
            before = trunk.state_dict()
            optimizer.param_groups[0]["lr"] = float("nan")
            with self.assertRaisesRegex(tf.InvalidArgument, "lr is no number"):
                trunk(torch.randn(2, 3)).sum().backward()
            with self.assertRaisesRegex(tf.FailedPrecondition, "not whole"):
                trunk(torch.randn(2, 3)).sum().backward()
            self.same(trunk.state_dict(), before)
            optimizer.param_groups[0]["lr"] = 0.1
            optimizer.zero_grad()
            trunk(torch.randn(2, 3)).sum().backward()
            self.assertEqual(trunk.step, 1)

    def test_steps_that_make_no_sense(self) -> None:
        client, trunk = self.serve(nn.Linear(3, 3))
        with trunk.training():
            trunk(torch.ones(1, 3)).sum().backward()
            for said, error in (
                ('{"step": {"n": 1}}', "groups is not a list"), ('{"step": {"n": "x"}}', "wanted a int|is not a int"),
                ('{"step": {"n": 3, "groups": [{}]}}', "step 3 does not follow"), ("[]", "as JSON"), ("{", "as JSON"),
                ('{"step": [1]}', "an object, step, as JSON"), ('{"step": null}', "an object, step, as JSON"),
                ('{"step": {"n": 1, "passes": 2, "groups": [{}]}}', "the client had 2"),
                ('{"step": {"n": 1, "optimizer": 3, "groups": [{}]}}', "no optimizer '3'"),
            ):  # fmt: skip
                for part, port in (("forward", "x"), ("backward", "y")):
                    with self.subTest(part, said=said), self.assertRaisesRegex(tf.Error, error):
                        params = {"lease": trunk._token, "lists": said}
                        client.call("trunk/" + part, {port: torch.ones(1, 3)}, params=params, like="torch").result()
            RemoteOptimizer(trunk.parameters()).step()
            self.assertEqual(trunk.step, 1)

    def test_no_grad_has_the_mode_of_the_client(self) -> None:
        for name in ("batch norm", "dropout"):
            with self.subTest(name):
                module = TRUNKS[name]()
                served = Case(module).served()
                with served as server, tf.connect(server.address) as client:
                    trunk, mine = RemoteModule(client, "trunk"), seeded(copy.deepcopy(module))
                    optimizer = RemoteOptimizer(trunk.parameters(), lr=0.1)
                    ours = torch.optim.SGD(mine.parameters(), lr=0.1)
                    x = torch.randn(8, 16)
                    with trunk.training():
                        for mode in (True, False, True, False):
                            for part in (trunk, mine):
                                part.train(mode)
                            for wait in (True, False):
                                said = []
                                for part, o, how in ((trunk, optimizer, {"wait": wait}), (mine, ours, {})):
                                    torch.manual_seed(3)
                                    h = x.clone().requires_grad_()
                                    o.zero_grad()
                                    part(h).square().mean().backward()
                                    o.step(**how)
                                    if not mode:
                                        torch.manual_seed(4)  # the trunk's model draws no seed
                                    with torch.no_grad():
                                        y = part(x)
                                    self.assertFalse(y.requires_grad)
                                    said.append(y)
                                self.assertTrue(torch.equal(*said), (mode, wait))
                        state = {f"trunk.{n}": t for n, t in trunk.state_dict().items()}
                        self.same(state, dict(mine.state_dict()))
                        self.assertEqual(held(client)["graphs"], 0)

    def test_a_tensor_modified_in_place_is_refused_as_torch_does(self) -> None:
        module = InPlace()
        with self.assertRaises(RuntimeError):
            module(torch.randn(2, 16)).sum().backward()
        _client, trunk = self.serve(module)
        with trunk.training():
            loss = trunk(torch.randn(2, 16)).sum()
            with self.assertRaisesRegex(tf.Error, "modifies in place"):
                loss.backward()
            optimizer = RemoteOptimizer(trunk.parameters())
            with self.assertRaisesRegex(tf.FailedPrecondition, "not whole"):
                optimizer.step()
            optimizer.zero_grad()
            self.assertEqual(trunk.step, 0)

    def test_double_backward_is_refused(self) -> None:
        _client, trunk = self.serve(nn.Linear(3, 3))
        x = torch.randn(2, 3, requires_grad=True)
        with trunk.training(), trunk.retain_graph():
            (g,) = torch.autograd.grad(trunk(x).square().sum(), x, create_graph=True)
            with self.assertRaisesRegex(RuntimeError, "twice"):
                g.sum().backward()

    def test_a_graph_is_used_once_unless_it_is_retained(self) -> None:
        _client, trunk = self.serve(nn.Linear(3, 3))
        x = torch.randn(2, 3, requires_grad=True)
        with trunk.training():
            loss = trunk(x).sum()
            loss.backward(retain_graph=True)
            with self.assertRaisesRegex(tf.FailedPrecondition, "a backward pass has used it"):
                loss.backward()
            trunk.zero_grad()
            with trunk.retain_graph():
                loss = trunk(x).sum()
                loss.backward(retain_graph=True)
                loss.backward()
            once = torch.autograd.grad(nn.Linear(3, 3)(x).sum(), x)  # any: only its shape counts
            self.assertEqual(x.grad.shape, once[0].shape)

    def test_a_graph_of_before_a_step_is_refused(self) -> None:
        _client, trunk = self.serve(nn.Linear(3, 3))
        x = torch.randn(2, 3, requires_grad=True)
        optimizer = RemoteOptimizer(trunk.parameters(), lr=0.1)
        with trunk.training():
            old = trunk(x).sum()
            trunk(x).sum().backward()
            optimizer.step()
            with self.assertRaisesRegex(tf.FailedPrecondition, "step 1 came after it; run the forward pass again"):
                old.backward()

    def test_dropped_outputs_free_their_graphs(self) -> None:
        client, trunk = self.serve(nn.Linear(3, 3))
        with trunk.training():
            kept = [trunk(torch.randn(2, 3)) for _ in range(5)]
            self.assertEqual(held(client)["graphs"], 5)
            self.assertGreater(held(client)["graph_bytes"], 0)
            del kept
            gc.collect()
            last = trunk(torch.randn(2, 3))  # says which are gone
            self.assertEqual(held(client)["graphs"], 1)
            del last
        eventually(lambda: held(client)["graph_bytes"] == 0)

    def test_eval_and_no_grad_use_the_last_weights(self) -> None:
        module = TRUNKS["batch norm"]()
        _client, trunk = self.serve(copy.deepcopy(module))
        x = torch.randn(4, 16)
        with torch.no_grad():
            self.assertTrue(torch.equal(trunk(x), module.eval()(x)))
        with trunk.training():
            trunk(x).sum().backward()
            RemoteOptimizer(trunk.parameters(), lr=0.1).step()
            module.load_state_dict(trunk.state_dict())
            trunk.eval()
            y = trunk(x)
            self.assertFalse(y.requires_grad)
            self.assertTrue(torch.equal(y, module(x)))
            x.requires_grad_()
            y = trunk(x)  # in eval mode, and with a gradient
            y.sum().backward()
            self.assertTrue(torch.equal(x.grad, torch.autograd.grad(module(x).sum(), x)[0]))

    def test_half_precision_on_the_wire(self) -> None:
        for wire, most in ((torch.bfloat16, 5e-2), (torch.float16, 5e-3)):
            with self.subTest(wire):
                torch.manual_seed(1)
                module = TRUNKS["mlp"]()
                client, _ = self.serve(copy.deepcopy(module))
                trunk = RemoteModule(client, "trunk", wire=wire)
                x = torch.randn(64, 16, requires_grad=True)
                want = torch.autograd.grad(module(x).square().sum(), x)[0]
                with trunk.training():
                    y = trunk(x)
                    self.assertEqual(y.dtype, torch.float32)
                    y.square().sum().backward()
                error = float((x.grad - want).norm() / want.norm())
                self.assertLess(error, most)
                self.assertGreater(error, 0)

    def test_a_model_that_does_not_train_is_refused(self) -> None:
        server = self.enter(tf.serve(nn.Linear(3, 3), 0, name="trunk"))
        client = self.enter(tf.connect(server.address))
        with self.assertRaisesRegex(tf.FailedPrecondition, "does not train") as caught:
            RemoteModule(client, "trunk")
        self.assertIn("--python trunk=…,train", caught.exception.hint)
        with self.assertRaisesRegex(tf.NotFound, "no model 'trunc'"):
            RemoteModule(client, "trunc")

    def test_state_dicts_are_loaded_whole_or_not_at_all(self) -> None:
        module = TRUNKS["batch norm"]()
        _client, trunk = self.serve(module)
        other = TRUNKS["batch norm"]()
        with trunk.training():
            trunk.load_state_dict(other.state_dict())
            for name, value in trunk.state_dict().items():
                self.assertTrue(torch.equal(value, other.state_dict()[name]), name)
            state = other.state_dict()
            state["0.weight"] = torch.zeros(16, 32)
            with self.assertRaisesRegex(
                tf.Error, r"0.weight float32 \[32, 16\], given was 0.weight float32 \[16, 32\]"
            ):
                trunk.load_state_dict(state)
            del state["0.weight"]
            with self.assertRaises(tf.Error):
                trunk.load_state_dict(state)
            self.assertTrue(torch.equal(trunk.state_dict()["0.weight"], other.state_dict()["0.weight"]))

    def test_torchs_schedulers_take_the_optimizer(self) -> None:
        sgd, adam = torch.optim.SGD, torch.optim.Adam
        for name, given, kind, options in (
            ("StepLR", {"step_size": 2, "gamma": 0.5}, sgd, {}),
            ("OneCycleLR", {"max_lr": 0.1, "total_steps": 10}, adam, {}),
            ("CyclicLR", {"base_lr": 0.01, "max_lr": 0.1}, sgd, {"momentum": 0.9}),
        ):
            with self.subTest(name):
                module = nn.Linear(3, 3)
                _, trunk = self.serve(copy.deepcopy(module))
                theirs = RemoteOptimizer(trunk.parameters(), kind, lr=0.1, **options)
                ours = kind(module.parameters(), lr=0.1, **options)
                schedules = [getattr(torch.optim.lr_scheduler, name)(o, **given) for o in (theirs, ours)]
                x = torch.randn(2, 3)
                with trunk.training():
                    for _ in range(6):
                        for part, o, s in ((trunk, theirs, schedules[0]), (module, ours, schedules[1])):
                            o.zero_grad()
                            part(x).square().sum().backward()
                            o.step()
                            s.step()
                    self.assertTrue(torch.equal(trunk.state_dict()["weight"], module.weight))

    def test_gradients_of_inputs_alone(self) -> None:
        module = nn.Linear(3, 3)
        _, trunk = self.serve(copy.deepcopy(module))
        x = torch.randn(2, 3, requires_grad=True)
        want = torch.autograd.grad(module(x).square().sum(), x)[0]
        optimizer = RemoteOptimizer(trunk.parameters(), lr=1.0)
        with trunk.training():
            self.assertTrue(torch.equal(torch.autograd.grad(trunk(x).square().sum(), x)[0], want))
            trunk(x).square().sum().backward(inputs=[x])
            self.assertTrue(torch.equal(x.grad, want))
            self.assertEqual(trunk.grad_norm(), (0.0, True))
            trunk(x).square().sum().backward()
            self.assertGreater(trunk.grad_norm()[0], 0)
            optimizer.step()

    def test_a_parameter_that_is_frozen(self) -> None:
        module = nn.Linear(3, 3)
        _, trunk = self.serve(copy.deepcopy(module))
        optimizer = RemoteOptimizer(trunk.parameters(), lr=1.0)
        dict(trunk.named_parameters())["weight"].requires_grad_(False)
        with trunk.training():
            trunk(torch.randn(2, 3)).sum().backward()
            optimizer.step()
            state = trunk.state_dict()
        self.assertTrue(torch.equal(state["weight"], module.weight))
        self.assertFalse(torch.equal(state["bias"], module.bias))

    def test_a_call_that_could_not_be_sent(self) -> None:
        _, trunk = self.serve(nn.Linear(3, 3))
        optimizer = RemoteOptimizer(trunk.parameters())
        with trunk.training():
            for wait in (True, False):
                trunk(torch.ones(1, 3)).sum().backward()
                optimizer.step(wait=wait)
                with self.assertRaises(TypeError):
                    trunk(torch.ones(1, 3).to_sparse())
                optimizer.zero_grad()
                trunk(torch.ones(1, 3)).sum().backward()
                optimizer.step()
            self.assertEqual(trunk.step, 4)

    def test_integers_with_a_type_of_the_wire(self) -> None:
        client, _ = self.serve(nn.Embedding(10, 4))
        trunk = RemoteModule(client, "trunk", wire=torch.bfloat16)
        with trunk.training():
            y = trunk(torch.tensor([1, 2]))
            self.assertEqual(y.dtype, torch.float32)
            y.sum().backward()
        for wrong in ("float16", torch.int8):
            with self.assertRaisesRegex(TypeError, "no floating-point type"):
                RemoteModule(client, "trunk", wire=wrong)

    def test_what_the_module_raises_is_told_to_its_trainer(self) -> None:
        _, trunk = self.serve(nn.Linear(3, 3))
        with trunk.training(), self.assertRaisesRegex(tf.Error, "shapes cannot be multiplied"):
            trunk(torch.ones(1, 4))
        _, two = self.serve(Two())
        with two.training(), self.assertRaisesRegex(tf.Error, "returned 3 results; declare them"):
            two(torch.ones(1, 16))

    def test_a_gradient_is_no_memory_of_the_link(self) -> None:
        class Places(nn.Module):  # type: ignore[misc,name-defined]
            """Its parameter's gradient is that of the output."""

            def __init__(self) -> None:
                super().__init__()
                self.place = nn.Parameter(torch.zeros(1, 64, 64))

            def forward(self, x: Any) -> Any:
                return (x + self.place).flatten(1)

        client, trunk = self.serve(Places())
        with trunk.training():
            trunk(torch.zeros(1, 64, 64)).sum().backward()
            for _ in range(30):
                client.compute("trunk", torch.full((1, 64, 64), 7.0))
            self.assertEqual(trunk.grad_norm()[0], 64.0)

    def test_those_who_wait_have_the_lease_in_their_turn(self) -> None:
        server = self.enter(tf.serve(nn.Linear(3, 3), 0, name="trunk", train=True))
        turns: list[int] = []

        def train(i: int) -> None:
            with tf.connect(server.address) as own:
                mine = RemoteModule(own, "trunk")
                while len(turns) < 9:
                    with mine.training(wait=30):
                        turns.append(i)
                        time.sleep(0.3)

        threads = [threading.Thread(target=train, args=(i,)) for i in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(set(turns), {0, 1, 2}, turns)

    def test_groups_of_parameters(self) -> None:
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        _client, trunk = self.serve(copy.deepcopy(module))

        def groups(m: Any) -> Any:
            p = dict(m.named_parameters())
            return [
                {"params": [p["0.weight"], p["0.bias"]], "lr": 0.5},
                {"params": [p["1.weight"]], "weight_decay": 0.1},
            ]

        theirs = RemoteOptimizer(groups(trunk), "momentum", lr=0.1, momentum=0.9)
        ours = torch.optim.SGD(groups(module), lr=0.1, momentum=0.9)
        x = torch.randn(2, 3)
        with trunk.training():
            for _ in range(3):
                for part, o in ((trunk, theirs), (module, ours)):
                    o.zero_grad()
                    part(x).square().sum().backward()
                    o.step()
            for name, value in trunk.state_dict().items():
                self.assertTrue(torch.equal(value, module.state_dict()[name]), name)

    def test_a_step_is_applied_once(self) -> None:
        client, trunk = self.serve(nn.Linear(3, 3))
        with trunk.training():
            trunk(torch.randn(2, 3)).sum().backward()
            said = {"n": 1, "lease": trunk._token, "optimizer": "sgd", "groups": '[{"lr": 1.0}]'}
            first = client.call("trunk/step", {}, params=said, like="torch").result()["y"]
            state = trunk.state_dict()
            again = client.call("trunk/step", {}, params=said, like="torch").result()["y"]
            self.assertTrue(torch.equal(first, again))
            self.assertTrue(torch.equal(state["weight"], trunk.state_dict()["weight"]))
            for n in (0, 3, -1):
                with self.assertRaisesRegex(tf.FailedPrecondition, f"step {n} does not follow step 1"):
                    client.call("trunk/step", {}, params={**said, "n": n}, like="torch").result()

    def test_params_that_make_no_sense(self) -> None:
        client, trunk = self.serve(nn.Linear(3, 3))
        with trunk.training():
            trunk(torch.ones(1, 3)).sum().backward()
            said = {"lease": trunk._token}
            octets = torch.zeros(3, dtype=torch.uint8)
            for part, inputs, params, error in (
                ("train", {"x": torch.ones(1, 3)}, {"seed": -1}, "seed -1 is not"),
                ("train", {"x": torch.ones(1, 3)}, {"wire": "int8"}, "is none of float32"),
                ("train", {"x": torch.ones(1, 3)}, {"order": "1"}, "use SERIES.N"),
                ("backward", {"y": torch.ones(1, 3)}, {"forward": "x"}, "graph of forward pass 'x' is gone"),
                ("step", {}, {"n": 1, "groups": "[]"}, "groups is not a list"),
                ("step", {}, {"n": 1, "groups": "{"}, "groups is not a list"),
                ("step", {}, {"n": 1, "groups": '[{"lr": "x"}]'}, "lr is no number"),
                ("step", {}, {"n": 1, "groups": '[{"params": ["w"]}]'}, "no parameter 'w'"),
                ("step", {}, {"n": 1, "groups": '[{"lr": -1}]'}, "Invalid learning rate"),
                ("step", {}, {"n": "one"}, "wanted a int"),
                ("step", {}, {"rewind": 3}, "there are no checkpoints"),
                ("state", {}, {"what": "all"}, "neither model nor optimizer"),
                ("load", {"y": octets, "about": octets}, {}, "about is not a list"),
                ("lease", {}, {"token": ""}, "token is missing"),
            ):
                with self.subTest(part, params=params), self.assertRaisesRegex(tf.Error, error):
                    lease = {} if part == "lease" else said
                    client.call("trunk/" + part, inputs, params={**lease, **params}, like="torch").result()
            RemoteOptimizer(trunk.parameters()).step()
            self.assertEqual(trunk.step, 1)

    def test_one_client_trains_at_a_time(self) -> None:
        server = self.enter(tf.serve(nn.Linear(3, 3), 0, name="trunk", train=True))
        client = self.enter(tf.connect(server.address))
        trunk, listing = RemoteModule(client, "trunk"), [program(), "models", "--server", server.address]
        other = RemoteModule(client, "trunk")
        with trunk.training():
            with self.assertRaisesRegex(tf.FailedPrecondition, "another client trains"), other.training():
                pass
            with self.assertRaisesRegex(tf.FailedPrecondition, "being trained here already"), trunk.training():
                pass
        with self.assertRaisesRegex(tf.FailedPrecondition, "not being trained here"):
            trunk(torch.randn(2, 3))
        with other.training():
            other(torch.randn(2, 3)).sum().backward()
            RemoteOptimizer(other.parameters()).step()
            said = {"n": 1, "lease": "old", "optimizer": "sgd", "groups": "[{}]"}
            with self.assertRaisesRegex(tf.FailedPrecondition, "another client trains; step 1 stands"):
                client.call("trunk/step", {}, params=said, like="torch").result()
            self.assertEqual(held(client)["lease"], 1)
            self.assertIn("trunk: a client trains it", subprocess.check_output(listing, text=True))
        self.assertEqual(held(client)["lease"], 0)
        self.assertEqual(held(client)["step"], 1)
        self.assertNotIn("trains", subprocess.check_output(listing, text=True))

    def test_a_session_that_ends_frees_its_graphs_and_in_time_the_lease(self) -> None:
        server = self.enter(Worker(lease="1s"))
        client = self.enter(tf.connect(server.address))
        with tf.connect(server.address) as gone:
            trunk = RemoteModule(gone, "trunk")
            with self.assertRaises(ValueError), trunk.training():
                loss = trunk(torch.randn(2, 3, requires_grad=True)).sum()
                self.assertEqual(held(client)["graphs"], 1)
                gone.close()
                loss.backward()
        eventually(lambda: held(client)["graphs"] == 0)
        self.assertEqual(held(client)["graph_bytes"], 0)
        other = RemoteModule(client, "trunk")

        def free() -> bool:
            try:
                with other.training():
                    return True
            except tf.FailedPrecondition as err:
                self.assertIn("cut off for", str(err))
                return False

        eventually(free)

    def test_an_optimizer_is_of_handles(self) -> None:
        _client, trunk = self.serve(nn.Linear(3, 3))
        with self.assertRaisesRegex(TypeError, "use torch's for your own"):
            RemoteOptimizer(nn.Linear(3, 3).parameters())
        names = [n for n, _ in trunk.named_parameters()]
        self.assertEqual(names, ["weight", "bias"])
        self.assertEqual([p.remote_shape for p in trunk.parameters()], [(3, 3), (3,)])
        with trunk.training():
            trunk(torch.randn(2, 3)).sum().backward()
            for kind in ("rprop", torch.optim.Rprop, 3):
                with self.assertRaisesRegex(TypeError, "no optimizer"):
                    RemoteOptimizer(trunk.parameters(), kind)
            optimizer = RemoteOptimizer(trunk.parameters())
            with self.assertRaisesRegex(TypeError, "of one RemoteModule"):
                optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
            self.assertEqual(len(optimizer.param_groups), 1)
            with self.assertRaisesRegex(TypeError, "on the server"):
                torch.optim.Adam(trunk.parameters()).step()


def linear() -> Any:
    torch.manual_seed(3)
    return nn.Linear(3, 3)


@needs_torch
class AsTorch(Served):
    """What the tests of torch's own RemoteModule and DistributedOptimizer look at, where it makes sense here."""

    def test_what_is_no_module_does_not_train(self) -> None:
        with self.assertRaisesRegex(TypeError, "cannot train; it is not a torch.nn.Module"):
            tf.serve(lambda x: x, 0, name="f", train=True)

    def test_a_device_that_is_none(self) -> None:
        with self.assertRaisesRegex(RuntimeError, "device"):
            tf.serve(nn.Linear(3, 3), 0, name="trunk", train=True, device="foo")

    def test_methods_that_are_not_supported(self) -> None:
        _, trunk = self.serve(nn.Linear(3, 3))
        for name, args in {
            "add_module": ("a", nn.ReLU()), "register_parameter": ("a", None), "register_buffer": ("a", None),
            "apply": (print,), "buffers": (), "named_buffers": (), "share_memory": (),
        }.items():  # fmt: skip
            with self.subTest(name), self.assertRaisesRegex(TypeError, "on the server"):
                getattr(trunk, name)(*args)
        with self.assertRaisesRegex(TypeError, "has the inputs x; 2 were given"):
            trunk(torch.ones(1), torch.ones(1))
        with self.assertRaisesRegex(TypeError, "given were z"):
            trunk(z=torch.ones(1))

    def test_a_step_that_raises(self) -> None:
        class Broken(tf.Trainer):  # type: ignore[name-defined,misc]
            def step(self, options: Any) -> None:
                raise ValueError("Error running optimizer.")

        _, trunk = self.serve(Broken(nn.Linear(3, 3)))
        with trunk.training():
            trunk(torch.ones(1, 3)).sum().backward()
            with self.assertRaisesRegex(tf.Internal, "ValueError: Error running optimizer."):
                RemoteOptimizer(trunk.parameters()).step()
            self.assertEqual(trunk.step, 0)

    def test_options_that_the_optimizer_does_not_take(self) -> None:
        client, trunk = self.serve(nn.Linear(3, 3))
        with trunk.training():
            trunk(torch.ones(1, 3)).sum().backward()
            with self.assertRaisesRegex(TypeError, "nesterov"):
                RemoteOptimizer(trunk.parameters(), "adam", nesterov=True)
            for groups, error in (
                ('[{"nesterov": true}]', "optimizer 'adam' takes no nesterov"),
                ('[{"lr": -1}]', "Invalid learning rate"),
                ('[{"lr": [1]}]', "no optimizer 'adam' with such options"),
                ('[{"lr": null}]', "no optimizer 'adam' with such options"),
                ('[{"\\ud800": 1}]', "optimizer 'adam' takes no"),
            ):
                with self.subTest(groups), self.assertRaisesRegex(tf.InvalidArgument, error):
                    said = {"lease": trunk._token, "n": 1, "optimizer": "adam", "groups": groups, "scale": 0.5}
                    client.call("trunk/step", {}, params=said, like="torch").result()
            before = trunk.grad_norm()
            RemoteOptimizer(trunk.parameters(), "adam", lr=0.0, maximize=True).step()
            self.assertEqual(before[0], 3.0**0.5 * 2, "what is refused does not scale")
            trunk(torch.ones(1, 3)).sum().backward()
            state = trunk.state_dict()
            RemoteOptimizer(trunk.parameters(), "adam", lr=0.1).step()  # not maximize
            self.assertTrue((trunk.state_dict()["bias"] < state["bias"]).all())

    def test_parameters_without_a_gradient_are_left_alone(self) -> None:
        module = Two()
        _, trunk = self.serve(copy.deepcopy(module), outputs=("a", "b", "place"))
        ours = torch.optim.AdamW(module.parameters(), lr=0.1)
        theirs = RemoteOptimizer(trunk.parameters(), torch.optim.AdamW, lr=0.1)
        x = torch.randn(4, 16)
        with trunk.training():
            for _ in range(2):
                for part, optimizer in ((module, ours), (trunk, theirs)):
                    optimizer.zero_grad()
                    part(x)[0].sum().backward()
                    optimizer.step()
            self.same(dict(module.state_dict()), trunk.state_dict())


if torch is not None:

    class Slow(nn.Module):
        """Takes as many seconds as its input says."""

        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(1, 1)

        def forward(self, x: Any) -> Any:
            time.sleep(float(x.sum()))
            return self.a(x)


def saved() -> Any:
    """The trunk of a Worker."""
    return torch.load(os.environ["TRUNK"], weights_only=False)


class Worker:
    """A server whose worker trains a trunk, linear if none is given, as `serve --python NAME=…,train` has it."""

    def __init__(self, *parts: str, lease: str = "30s", trunk: Any = None) -> None:
        self.folder = tempfile.TemporaryDirectory()
        torch.save(trunk or linear(), self.folder.name + "/trunk.pt")
        self.server = Server(
            "--python", ",".join(("trunk=test_train:saved", "train", f"lease={lease}", *parts)),
            "--python-env", f"TRUNK={self.folder.name}/trunk.pt", "--python-threads", "1",
        )  # fmt: skip
        self.address = self.server.address

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()
        self.folder.cleanup()


@needs_torch
class Faults(Torch):
    """What is cut, and what stands then."""

    def test_flags_that_do_not_fit_are_refused(self) -> None:
        env = {
            **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TENSORFERRY_PYTHON": sys.executable,
        }  # fmt: skip
        for args, said in (
            (["--train", "trunk"], "no --python has this name"),
            (["--python", "trunk=test_train:linear", "--train", "trunk", "--python-processes", "2"], "has one process"),
            (["--python", "trunk=test_train:linear,train", "--python-processes", "2"], "has one process"),
            (
                ["--python", "trunk=test_train:linear,trains"],
                "trains. is not one of blocks, checkpoint, checkpoint-every, lease, train",
            ),
            (["--python", "trunk=test_train:linear,checkpoint"], "checkpoint has no value"),
            (["--python", "trunk=test_train:linear,lease=long"], "lease=.*not a duration"),
        ):
            command = [program(), "serve", "--listen", "127.0.0.1:0", *args]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=False)
            self.assertNotEqual(ended.returncode, 0)
            self.assertRegex(ended.stderr, said)

    def test_a_worker_that_is_killed_goes_on_from_its_checkpoint(self) -> None:
        folder = self.enter(tempfile.TemporaryDirectory())
        server = self.enter(Worker(f"checkpoint={folder}", "checkpoint-every=2"))
        client = self.enter(tf.connect(server.address, retry="exponential", retry_for=20))
        trunk = RemoteModule(client, "trunk")
        x, states = torch.ones(2, 3), {}

        def step(optimizer: Any) -> None:
            optimizer.zero_grad()
            trunk(x).square().sum().backward()
            optimizer.step()
            states[trunk.step] = trunk.state_dict()

        with trunk.training():
            optimizer = RemoteOptimizer(trunk.parameters(), "adam", lr=0.1)
            for _ in range(3):
                step(optimizer)
            self.assertEqual(sorted(os.listdir(os.path.join(folder, "trunk"))), ["step-2.pt"])
            kill_worker(server.server.process.pid)
            with self.assertRaises(tf.Error):
                for _ in range(50):
                    trunk(x).sum().backward()
        with trunk.training():
            self.assertEqual(trunk.step, 2)
            self.same(trunk.state_dict(), states[2])
            third = states[3]
            step(optimizer)
            self.same(trunk.state_dict(), third)
            trunk.rewind(2)
            self.same(trunk.state_dict(), states[2])
            step(optimizer)
            self.same(trunk.state_dict(), third)
            with self.assertRaisesRegex(tf.FailedPrecondition, "no checkpoint 1; there are 2"):
                trunk.rewind(1)

    def test_a_fused_step_whose_answer_died_with_the_worker(self) -> None:
        for every, stands in ((1, 3), (2, 2), (3, 3)):
            folder = self.enter(tempfile.TemporaryDirectory())
            server = self.enter(Worker(f"checkpoint={folder}", f"checkpoint-every={every}"))
            client = self.enter(tf.connect(server.address, retry="exponential", retry_for=20))
            trunk, module, x = RemoteModule(Losing(client), "trunk"), linear(), torch.ones(2, 3)
            theirs = RemoteOptimizer(trunk.parameters(), "adam", lr=0.1, fused=True)
            ours = torch.optim.Adam(module.parameters(), lr=0.1)

            def step(middle: Any, optimizer: Any, x: Any = x) -> Any:
                h = x.clone().requires_grad_()
                optimizer.zero_grad()
                middle(h).square().sum().backward()
                optimizer.step()
                return h.grad

            with self.subTest(every=every), trunk.training():
                for _ in range(2):
                    self.assertTrue(torch.equal(step(trunk, theirs), step(module, ours)))
                trunk._client.lost = [("backward", "answer")]
                trunk._client.after = lambda server=server: kill_worker(server.server.process.pid)
                want = step(module, ours)
                if stands == 3:
                    self.assertTrue(torch.equal(step(trunk, theirs), want))
                else:
                    with self.assertRaises(tf.Unavailable):
                        step(trunk, theirs)
                    self.assertTrue(torch.equal(step(trunk, theirs), want))
                self.same(trunk.state_dict(), dict(module.state_dict()))
                self.assertEqual(trunk.step, 3)

    def test_a_client_that_trains_hears_that_the_server_has_gone_back(self) -> None:
        folder = self.enter(tempfile.TemporaryDirectory())
        server = self.enter(Worker(f"checkpoint={folder}", "checkpoint-every=1"))
        client = self.enter(tf.connect(server.address, retry="exponential", retry_for=20))
        trunk = RemoteModule(client, "trunk")
        x = torch.ones(2, 3)
        with trunk.training():
            optimizer = RemoteOptimizer(trunk.parameters(), "adam", lr=0.1)
            for _ in range(2):
                trunk(x).square().sum().backward()
                optimizer.step()
            trunk(x).square().sum().backward()
            os.unlink(os.path.join(folder, "trunk", "step-2.pt"))
            kill_worker(server.server.process.pid)
            with self.assertRaises(Rewound) as caught:
                optimizer.step()
            self.assertEqual(caught.exception.step, 1)
            trunk(x).square().sum().backward()
            optimizer.step()
            self.assertEqual(trunk.step, 2)

    def test_a_pass_that_is_cancelled_does_not_end_the_process(self) -> None:
        server = self.enter(Worker(trunk=Slow()))
        client = self.enter(tf.connect(server.address))
        trunk = RemoteModule(client, "trunk", timeout=0.5)
        with trunk.training():
            with self.assertRaises(tf.DeadlineExceeded):
                trunk(torch.full((1, 1), 4.0))
            trunk._timeout = 30
            trunk(torch.zeros(1, 1)).sum().backward()
            RemoteOptimizer(trunk.parameters()).step()
            self.assertEqual(trunk.step, 1)
            self.assertEqual(held(client)["worker_restarts"], 0)
            self.assertEqual(held(client)["graphs"], 0)

    def test_a_lease_of_no_time_ends_with_its_session(self) -> None:
        server = self.enter(Worker(lease="0s"))
        gone = tf.connect(server.address)
        RemoteModule(gone, "trunk")._lease().__enter__()
        gone.close()
        with RemoteModule(self.enter(tf.connect(server.address)), "trunk").training(wait=5):
            pass

    def test_a_folder_of_checkpoints_is_of_one_process(self) -> None:
        folder = self.enter(tempfile.TemporaryDirectory())
        self.enter(tf.serve(linear(), 0, name="trunk", train=True, checkpoint=folder))
        with self.assertRaisesRegex(ValueError, "another process keeps its checkpoints"):
            tf.serve(linear(), 0, name="trunk", train=True, checkpoint=folder)
        self.assertEqual(os.listdir(folder), [])

    def test_a_checkpoint_that_cannot_be_loaded_is_named(self) -> None:
        folder = self.enter(tempfile.TemporaryDirectory())
        for text in ("step-3.pt", "half.new"):
            with open(os.path.join(folder, text), "wb") as f:
                f.write(b"no checkpoint")
        with self.assertRaisesRegex(ValueError, r"step-3.pt cannot be loaded"):
            tf.serve(linear(), 0, name="trunk", train=True, checkpoint=folder)
        self.assertEqual(os.listdir(folder), ["step-3.pt"])

    def test_a_step_without_a_checkpoint_stands_and_its_trainer_is_told(self) -> None:
        folder = self.enter(tempfile.TemporaryDirectory())
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.addCleanup(resource.setrlimit, resource.RLIMIT_FSIZE, limit)
        trunk_of = nn.Linear(300, 300)  # of more bytes than any other file that is written meanwhile
        served = tf.serve(trunk_of, 0, name="trunk", train=True, checkpoint=folder, checkpoint_every=1)
        with served as server, tf.connect(server.address) as client, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            trunk = RemoteModule(client, "trunk")
            with trunk.training():
                for step in range(1, 5):
                    trunk(torch.ones(2, 300)).sum().backward()
                    if step == 2:
                        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, limit[1]))  # as a disk that is full
                    RemoteOptimizer(trunk.parameters()).step()
                self.assertEqual(trunk.step, 4)
                eventually(lambda: held(client)["checkpoints_failed"] == 3)
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        told = [str(w.message) for w in told if w.category is RuntimeWarning]
        self.assertEqual(len(told), 1, told)
        self.assertRegex(told[0], "trunk: step 2 stands, but has no checkpoint: .*; those that are kept: 1")
        self.assertEqual(sorted(os.listdir(folder)), ["step-1.pt", "step-4.pt"])  # that of the orderly end

    def test_two_checkpoints_are_kept(self) -> None:
        folder = self.enter(tempfile.TemporaryDirectory())
        served = tf.serve(linear(), 0, name="trunk", train=True, checkpoint=folder, checkpoint_every=1)
        with served as server, tf.connect(server.address) as client:
            trunk = RemoteModule(client, "trunk")
            with trunk.training():
                for _ in range(4):
                    trunk(torch.ones(2, 3)).sum().backward()
                    RemoteOptimizer(trunk.parameters()).step()
        self.assertEqual(sorted(os.listdir(folder)), ["step-3.pt", "step-4.pt"])

    def test_an_orderly_end_leaves_a_checkpoint(self) -> None:
        folder = self.enter(tempfile.TemporaryDirectory())
        with Worker(f"checkpoint={folder}") as server, tf.connect(server.address) as client:
            trunk = RemoteModule(client, "trunk")
            with trunk.training():
                trunk(torch.ones(2, 3)).sum().backward()
                RemoteOptimizer(trunk.parameters(), lr=0.1).step()
                state = trunk.state_dict()
        self.assertEqual(os.listdir(os.path.join(folder, "trunk")), ["step-1.pt"])
        with Worker(f"checkpoint={folder}") as server, tf.connect(server.address) as client:
            trunk = RemoteModule(client, "trunk")
            with trunk.training():
                self.assertEqual(trunk.step, 1)
                self.same(trunk.state_dict(), state)


def kill_worker(server: int) -> None:
    """Kill the worker of a server."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as f:
                parent = int(f.read().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == server:
            os.kill(int(pid), signal.SIGKILL)


if __name__ == "__main__":
    unittest.main()
