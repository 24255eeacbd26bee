"""The programs of docs/worker.md run as they are there."""

from __future__ import annotations

import importlib
import pathlib
import re
import sys
import tempfile
import unittest
from typing import Any

import tensorferry as tf
from support import ROOT, Server, needs_torch, program, torch

# A GPT-2 in the shape that transformers has: wte, wpe, h and ln_f, and blocks that take layer_past and use_cache.
GPT2 = """
import math, torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden_states, layer_past=None, attention_mask=None, use_cache=False):
        batch, rows, width = hidden_states.shape
        q, k, v = (y.view(batch, rows, self.heads, -1).transpose(1, 2)
                   for y in self.qkv(self.ln_1(hidden_states)).split(width, -1))
        if layer_past is not None:
            k, v = torch.cat([layer_past[0], k], -2), torch.cat([layer_past[1], v], -2)
        seen = torch.ones(rows, k.shape[-2], dtype=torch.bool).tril(k.shape[-2] - rows)
        weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf).softmax(-1)
        x = hidden_states + self.proj((weights @ v).transpose(1, 2).reshape(batch, rows, width))
        x = x + self.mlp(self.ln_2(x))
        return (x, (k, v)) if use_cache else (x,)

class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe, self.ln_f = nn.Embedding(64, 32), nn.Embedding(64, 32), nn.LayerNorm(32)
        self.h = nn.ModuleList(Block(32, 4) for _ in range(10))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer, self.lm_head = Transformer(), nn.Linear(32, 64, bias=False)

    def forward(self, tokens):
        gpt = self.transformer
        x = (gpt.wte(tokens) + gpt.wpe(torch.arange(len(tokens))))[None]
        for block in gpt.h:
            x = block(x)[0]
        return self.lm_head(gpt.ln_f(x))[0]

def load():
    torch.manual_seed(4)
    return Model().double().eval()
"""


@needs_torch
class Cache(unittest.TestCase):
    def setUp(self) -> None:
        text = (ROOT / "docs" / "worker.md").read_text("utf-8")
        section = text.split("## A cache of a transformer\n")[1].split("\n## ")[0]
        served, self.client = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        for name, code in (("gpt", GPT2), ("models", served)):
            pathlib.Path(folder.name, name + ".py").write_text(code, "utf-8")
        self.addCleanup(sys.modules.pop, "gpt", None)
        sys.path.insert(0, folder.name)
        self.addCleanup(sys.path.remove, folder.name)
        self.model = importlib.import_module("gpt").load()

    def test_text_with_caches_in_two_places_is_that_of_the_whole(self) -> None:
        program()
        scope: dict[str, Any] = {"torch": torch}
        exec(self.client, scope)
        want = prompt = torch.tensor([1, 60, 3, 7, 7])
        with torch.no_grad():
            for _ in range(12):
                want = torch.cat([want, self.model(want)[-1:].argmax(-1)])
        server = Server("--python", "trunk=models:Trunk")
        self.addCleanup(server.stop)
        with tf.connect(server.address) as client:
            for _ in range(2):
                self.assertEqual(scope["generate"](self.model, client, prompt, 12).tolist(), want.tolist())


if __name__ == "__main__":
    unittest.main()
