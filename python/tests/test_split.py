"""A torch module that is cut at two blocks computes what it computes in one piece."""

from __future__ import annotations

import copy
import unittest
from typing import Any, Callable

import tensorferry as tf
from support import Server, needs_torch, program, torch
from tensorferry._model import prepare

if torch is not None:
    from tensorferry.torch import RemoteModule, RemoteOptimizer, split

    nn = torch.nn

    class Block(nn.Module):
        """A block that may take more than its tensor, and may return it in a tuple, as those of GPT-2 do."""

        def __init__(self, several: bool, drop: float) -> None:
            super().__init__()
            self.several = several
            self.norm, self.mix, self.drop = nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(drop)

        def forward(self, x: Any, scale: Any = None, extra: bool = False) -> Any:
            y = x + self.drop(torch.tanh(self.mix(self.norm(x))))
            y = y if scale is None else y * scale
            return (y, y.sum() if extra else None) if self.several else y

    class Pair(nn.Linear):
        def forward(self, x: Any, scale: Any) -> Any:
            y = super().forward(x)
            return y, None if scale is None else scale

    class Two(nn.Linear):
        def forward(self, x: Any) -> Any:
            return super().forward(x), x

    def plain(x: Any, block: Any, i: int, scale: Any) -> Any:
        return block(x) if scale is None else block(x, scale)

    class GPT(nn.Module):
        """Tokens, positions, a list of blocks in a loop, and a head of the tokens' weight."""

        def __init__(
            self, turn: Callable[..., Any] = plain, several: bool = False, drop: float = 0.0, of: Any = None
        ) -> None:
            super().__init__()
            self.turn = turn
            self.wte, self.wpe, self.drop = nn.Embedding(20, 8), nn.Embedding(16, 8), nn.Dropout(drop)
            self.h = nn.ModuleList(of(8, 8) if of else Block(several, drop) for _ in range(6))
            self.shift = nn.Parameter(torch.ones(8))
            self.ln, self.head = nn.LayerNorm(8), nn.Linear(8, 20, bias=False)
            self.head.weight = self.wte.weight
            self.register_buffer("ones", torch.ones(8))

        def forward(self, tokens: Any, scale: Any = None) -> Any:
            _, t = tokens.shape
            x = self.drop(self.wte(tokens) + self.wpe(torch.arange(t, device=tokens.device))) * self.ones
            for i, block in enumerate(self.h):
                x = self.turn(x, block, i, scale)
            return self.head(self.ln(x + self.shift))

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.blocks = nn.Linear(8, 8), nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])

        def forward(self, x: Any) -> Any:
            return self.blocks(self.stem(x)) + 1

    class Loop(nn.Module):
        """Does something with its inputs before its blocks, and something with all that they return after them."""

        def __init__(self, before: Callable[..., Any], after: Callable[..., Any] = lambda x, xs: xs[-1]) -> None:
            super().__init__()
            self.before, self.after = before, after
            self.h = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
            self.register_buffer("sum", torch.zeros(8))

        def forward(self, *inputs: Any) -> Any:
            xs = [self.before(self, *inputs)]
            for block in self.h:
                xs.append(block(xs[-1]))
            return self.after(xs[0], xs)

    def encoder() -> Any:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        return nn.TransformerEncoder(layer, 6, norm=nn.LayerNorm(8))

    def linears() -> Any:
        return nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])

    def halved(model: Any, *inputs: Any) -> Any:
        return inputs[0] / 2 if inputs[0].sum() > 0 else inputs[0]

    @tf.model(rows=1)
    def seeded() -> Any:
        torch.manual_seed(3)
        return GPT()

    @tf.model(inputs={"x": "float32", "scale": "float32"})
    def scaled() -> Any:
        return seeded()


@needs_torch
class Cut(unittest.TestCase):
    def setUp(self) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self.addCleanup(torch.set_num_threads, threads)
        torch.manual_seed(1)
        self.tokens, self.rows = torch.randint(20, (2, 5)), torch.randn(2, 5, 8)

    def gradients(self, model: Any, x: Any, parts: Any = (), given: Any = ()) -> list[Any]:
        torch.manual_seed(2)
        model.zero_grad()
        if parts:
            bottom, trunk, top = parts
            y = top(trunk(bottom(x)), *given)
        else:
            y = model(x)
        y.square().sum().backward()
        return [y, torch.rand(3), *[p.grad.clone() for p in model.parameters()]]

    def test_the_parts_compute_what_the_whole_does(self) -> None:
        cases: list[tuple[str, Callable[[], Any], str, str, Any]] = [
            ("a list", GPT, "h.2", "h.4", self.tokens),
            ("no block in bottom", GPT, "h.0", "h.5", self.tokens),
            ("dropout", lambda: GPT(drop=0.3), "h.2", "h.4", self.tokens),
            ("tuples", lambda: GPT(lambda x, b, i, s: b(x)[0], several=True), "h.0", "h.4", self.tokens),
            ("no default", lambda: GPT(lambda x, b, i, s: b(x, None)[0], of=Pair), "h.2", "h.4", self.tokens),
            ("within", lambda: nn.Sequential(GPT(), nn.Linear(20, 3)), "0.h.2", "0.h.4", self.tokens),
            ("an encoder", encoder, "layers.2", "layers.4", self.rows),
            ("a Sequential", linears, "2", "4", self.rows),
            ("a Sequential within", Body, "blocks.1", "blocks.2", self.rows),
            (
                "skip to the end",
                lambda: Loop(lambda m, x: x * 2, lambda x, xs: xs[-1] + xs[-2]),
                "h.1",
                "h.4",
                self.rows,
            ),
        ]
        for name, make, first, second, x in cases:
            for given in ([], [x]):
                with self.subTest(name, given=len(given)):
                    model = make()
                    parts = split(model, first, second)
                    if given and name == "a Sequential":
                        continue
                    alone = self.gradients(model, x)
                    cut = self.gradients(model, x, parts, given)
                    self.assertTrue(all(map(torch.equal, alone, cut)))
                    held = [id(p) for part in parts for p in part.parameters()]
                    self.assertCountEqual(held, map(id, model.parameters()))
                    self.assertCountEqual([n for part in parts for n in part.state_dict()], model.state_dict())
                    for part in parts:
                        part.load_state_dict({n: t for n, t in model.state_dict().items() if n in part.state_dict()})
                    with torch.no_grad():
                        bottom, trunk, top = copy.deepcopy(parts)
                        for part in (model.eval(), bottom.eval(), trunk.eval(), top.eval()):
                            self.assertFalse(part.training)
                        self.assertTrue(torch.equal(top(trunk(bottom(x)), *given), model(x)))

    def test_tensors_beside_the_first(self) -> None:
        model, scale = GPT(), torch.rand(2, 5, 8)
        bottom, trunk, top = split(model, "h.2", "h.4", also=["scale"])
        h = trunk(*bottom(self.tokens, scale))
        self.assertTrue(torch.equal(top(h, self.tokens, scale), model(self.tokens, scale)))
        with self.assertRaisesRegex(RuntimeError, r"h.4 needs values from before the cut: call top\(h, x\)"):
            top(h)
        with self.assertRaisesRegex(TypeError, "takes x, scale; 1 tensors were given"):
            trunk(h)
        mask = torch.rand(5, 5)
        model = encoder().eval()
        bottom, trunk, top = split(model, "layers.1", "layers.3", also=["src_mask"])
        h = trunk(*bottom(self.rows, mask))
        self.assertTrue(torch.equal(top(h, self.rows, mask), model(self.rows, mask)))

    def test_top_needs_values_only_where_it_says(self) -> None:
        def summed(model: Any, x: Any) -> Any:
            model.sum.add_(x.detach().sum((0, 1)))
            return x

        cases: list[tuple[Any, tuple[Any, ...], str]] = [
            (Loop(halved), (self.rows,), "__bool__ needs values|is_nonzero needs values"),
            (Loop(summed), (self.rows,), "add_ needs values"),
            (Loop(lambda m, x: x, lambda x, xs: xs[-1] + x), (self.rows,), "what the model returns needs values"),
            (Loop(lambda m, x, n: x + n), (self.rows, 3), "takes a int needs values"),
        ]
        for model, inputs, says in cases:
            with self.subTest(says):
                bottom, trunk, top = split(model, "h.2", "h.4")
                with self.assertRaisesRegex(RuntimeError, "top before bottom needs values"):
                    top(self.rows)
                h = trunk(bottom(*inputs))
                with self.assertRaisesRegex(RuntimeError, says):
                    top(h)
                self.assertTrue(torch.equal(top(h, *inputs), model(*inputs)))
        bottom, trunk, top = split(model := GPT(), "h.2", "h.4")
        h = trunk(bottom(self.tokens))
        bottom(self.tokens[:, :3])
        with self.assertRaisesRegex(RuntimeError, r"a tensor of \[2, 5, 8\], where bottom returned \[2, 3, 8\] last"):
            top(h)
        self.assertTrue(torch.equal(top(h, self.tokens), model(self.tokens)))

    def test_what_cannot_be_cut_says_so(self) -> None:
        first: list[Any] = []

        def apart(x: Any, block: Any, i: int, scale: Any) -> Any:
            first[:] = first if i else [x]
            return block(first[0])

        turns: list[tuple[Callable[..., Any], str]] = [
            (lambda x, b, i, s: b(x) + x, "uses the result of h.2 in add"),
            (lambda x, b, i, s: b(x.clone() if i == 4 else x), "uses the result of h.3 in clone"),
            (apart, "h.3 is not called with the result of h.2"),
            (lambda x, b, i, s: b(b(x)), "calls h.0 out of order"),
            (lambda x, b, i, s: x if i == 3 else b(x), "calls h.4 out of order"),
            (lambda x, b, i, s: x if i == 5 else b(x), "does not call h.5"),
            (lambda x, b, i, s: x if i > 1 else b(x), "does not call h.2"),
            (lambda x, b, i, s: b(x, extra=True), "h.2 is called with extra=True, which the trunk does not know"),
            (lambda x, b, i, s: b(x, x), r"h.2 is called with scale=a Tensor.*also=\['scale'\]"),
            (
                lambda x, b, i, s: b(x, (x, x) if i == 2 else None),
                r"h.2 is called with scale=a tuple.*also=\['scale'\]",
            ),
            (lambda x, b, i, s: b(x)[0], "takes a part of the result of h.3"),
            (lambda x, b, i, s: b([x]) if i == 2 else b(x), "h.2 is called with a list first"),
        ]
        for turn, says in turns:
            with self.subTest(says), self.assertRaisesRegex(RuntimeError, "the model cannot be cut here: .*" + says):
                bottom, trunk, top = split(GPT(turn), "h.2", "h.4")
                top(trunk(bottom(self.tokens)), self.tokens)
        for model, says in (
            (Loop(lambda m, x: x, lambda x, xs: xs), "returns the result of h.2"),
            (GPT(lambda x, b, i, s: b(x)[0], of=Two), "block 2 returns more than one tensor"),
            (GPT(lambda x, b, i, s: b(x)[0] if i == 2 else b(x)), "takes a part of the result of h.3"),
            (GPT(lambda x, b, i, s: b(x, extra=i == 3)[0], several=True), "h.3 is called with extra=True"),
        ):
            with self.subTest(says), self.assertRaisesRegex(RuntimeError, says):
                bottom, trunk, top = split(model, "h.2", "h.4")
                x = self.tokens if isinstance(model, GPT) else self.rows
                top(trunk(bottom(x)), x)
        bottom, trunk, top = split(GPT(lambda x, b, i, s: b(x, s * 1)), "h.2", "h.4", also=["scale"])
        with self.assertRaisesRegex(RuntimeError, "h.3 is not called with the same scale"):
            top(trunk(*bottom(self.tokens, self.rows)), self.tokens, self.rows)

    def test_blocks_that_cannot_be_cut_at(self) -> None:
        gpt, both = GPT(), GPT()
        both.h.append(both.h[3])
        patched = GPT()
        patched.forward = lambda x: x
        for model, first, second, error, says in (
            (gpt, "h.2", "h.9", ValueError, "no block 'h.9'; it has h.0 to h.5"),
            (linears(), "2", "x.y", ValueError, "no block 'x.y'; it has 0 to 5"),
            (nn.Linear(1, 1), "0", "1", ValueError, "no block '0'; it has no list of blocks"),
            (gpt, "wte", "ln", TypeError, "'wte' is in a GPT, not in a ModuleList or Sequential"),
            (gpt, "h.4", "h.2", ValueError, "'h.2' does not come after 'h.4'"),
            (gpt, "h.2", "h.2", ValueError, "'h.2' does not come after 'h.2'"),
            (nn.Sequential(linears(), linears()), "0.1", "1.2", ValueError, "are not in one list of blocks"),
            (both, "h.2", "h.4", ValueError, "'h.6.norm.weight' and 'h.3.norm.weight' are one weight"),
            (patched, "h.2", "h.4", TypeError, "the forward of a GPT was replaced"),
        ):
            with self.subTest(says), self.assertRaisesRegex(error, says):
                split(model, first, second)

    def test_each_part_has_its_mode(self) -> None:
        model = Loop(lambda m, x: x * 2 if m.training else x)
        bottom, trunk, top = split(model, "h.2", "h.4")
        bottom.eval()
        self.assertTrue(torch.equal(top(trunk(bottom(self.rows))), model.eval()(self.rows)))
        self.assertTrue(top.training)
        self.assertFalse(any(m.training for part in split(model, "h.2", "h.4") for m in part.modules()))

    def test_hooks_run_once(self) -> None:
        model, ran = GPT(), list[Any]()
        for block in model.h:
            block.register_forward_hook(lambda b, x, y: ran.append(b))
        bottom, trunk, top = split(model, "h.2", "h.4")
        top(trunk(bottom(self.tokens)))
        self.assertEqual(ran, list(model.h))

    def test_a_trunk_on_a_server(self) -> None:
        program()
        whole, twin = GPT(), GPT()
        twin.load_state_dict(whole.state_dict())
        bottom, trunk, top = split(twin, "h.2", "h.4")
        with tf.serve(trunk, 0, name="trunk", train=True) as server, tf.connect(server.address) as client:
            remote = RemoteModule(client, "trunk")
            mine = torch.optim.SGD([*bottom.parameters(), *top.parameters()], lr=0.1)
            theirs, alone = (
                RemoteOptimizer(remote.parameters(), "sgd", lr=0.1),
                torch.optim.SGD(whole.parameters(), 0.1),
            )
            with remote.training():
                for _ in range(3):
                    mine.zero_grad(), theirs.zero_grad(), alone.zero_grad()
                    for loss in (top(remote(bottom(self.tokens))).square().sum(), whole(self.tokens).square().sum()):
                        loss.backward()
                    mine.step(), theirs.step(), alone.step()
            for n, t in whole.state_dict().items():
                self.assertTrue(torch.equal(t, twin.state_dict()[n]), n)

    def test_a_served_trunk_takes_what_bottom_returns(self) -> None:
        program()
        model, scale = GPT(), torch.rand(2, 5, 8)
        bottom, trunk, top = split(model.eval(), "h.2", "h.4", also=["scale"])
        with tf.serve(trunk, 0, name="trunk") as server, tf.connect(server.address) as client, torch.no_grad():
            said = client.call("trunk", dict(zip(("x", "scale"), bottom(self.tokens, scale)))).result()
            self.assertTrue(torch.equal(top(said["y"], self.tokens, scale), model(self.tokens, scale)))

    def test_a_server_has_only_the_blocks_that_it_is_told(self) -> None:
        program()
        server = Server(
            "--python", "trunk=test_split:seeded,blocks=h.2:h.4", "--python", "body=test_split:Body,train,blocks=blocks.1:blocks.5",
            "--python", "scaled=test_split:scaled,blocks=h.2:h.4", "--python-threads", "1",
        )  # fmt: skip
        self.addCleanup(server.stop)
        model, scale = seeded().eval(), torch.rand(2, 5, 8)
        bottom, _, top = split(model, "h.2", "h.4")
        with tf.connect(server.address) as client, torch.no_grad():
            served = {m.name: m for m in client.models()}
            self.assertEqual(
                served["trunk"].about["parameters"], str(sum(p.numel() for p in model.h[2:4].parameters()))
            )
            self.assertEqual((list(served["trunk"].inputs), served["trunk"].rows), (["x"], 1))
            self.assertTrue(torch.equal(top(client.compute("trunk", bottom(self.tokens))), model(self.tokens)))
            self.assertEqual(next(p.remote_name for p in RemoteModule(client, "body").parameters()), "blocks.1.weight")
            bottom, _, top = split(model, "h.2", "h.4", also=["scale"])
            said = client.call("scaled", dict(zip(("x", "scale"), bottom(self.tokens, scale)))).result()
            self.assertTrue(torch.equal(top(said["y"], self.tokens, scale), model(self.tokens, scale)))

    def test_blocks_that_cannot_be_served(self) -> None:
        for made, blocks, why in (
            (GPT(), "h.2:h.9", "no block 'h.9'; it has h.0 to h.5"),
            (GPT(), "h.4:h.2", "'h.2' does not come after 'h.4'"),
            (lambda x: x, "h.2:h.4", "blocks=h.2:h.4 are those of a torch.nn.Module, not of a function"),
        ):
            with self.assertRaisesRegex((TypeError, ValueError), why):
                prepare(made, None, {"blocks": blocks})


if __name__ == "__main__":
    unittest.main()
