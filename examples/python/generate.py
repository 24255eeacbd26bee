"""A text, token by token: the demo's writer, whose trunk and its cache are on a server, and then all of it here.

The server must have the trunk: tensorferry serve --demo
"""

import argparse
import collections
import time

import torch
from fashion import FOLDER, weights
from torch import nn

import tensorferry as tf
from tensorferry.torch import split

TEXT, START, LENGTH = FOLDER.parent / "text", "Sherlock Holmes ", 400
VOCABULARY = (TEXT / "data/vocabulary.txt").read_text()


class Start(nn.Module):
    def __init__(self, width, positions):
        super().__init__()
        self.tokens, self.places, self.past = nn.Embedding(len(VOCABULARY), width), nn.Embedding(positions, width), 0

    def forward(self, ids):
        begin, self.past = self.past, self.past + ids.shape[1]
        return self.tokens(ids) + self.places.weight[begin : self.past]


class Block(nn.TransformerEncoderLayer):
    """A block that keeps the keys and values of all positions so far."""

    def __init__(self, width, heads):
        super().__init__(width, heads, 4 * width, activation="gelu", batch_first=True, norm_first=True)
        self.kept = torch.zeros(2, heads, 0, width // heads)

    def forward(self, x):
        a, (_, n, width) = self.self_attn, x.shape
        qkv = nn.functional.linear(self.norm1(x), a.in_proj_weight, a.in_proj_bias)
        q, *new = qkv.view(n, 3, a.num_heads, -1).permute(1, 2, 0, 3)
        self.kept = k, v = torch.cat([self.kept, torch.stack(new)], 2)
        later = torch.ones(n, k.shape[1], dtype=torch.bool).triu(1 + k.shape[1] - n)
        scores = (q @ k.transpose(1, 2) / q.shape[2] ** 0.5).masked_fill(later, -torch.inf)
        x = x + a.out_proj((scores.softmax(2) @ v).transpose(0, 1).reshape(1, n, width))
        return x + self.linear2(nn.functional.gelu(self.linear1(self.norm2(x))))


def writer():
    state = weights("bottom", TEXT) | weights("trunk", TEXT) | weights("top", TEXT)
    positions, width = state["places.weight"].shape
    parts = {"start": Start(width, positions), **{str(i): Block(width, 4) for i in range(4)}}
    parts |= {"norm": nn.LayerNorm(width), "head": nn.Linear(width, len(VOCABULARY))}
    model = nn.Sequential(collections.OrderedDict(parts)).eval()
    model.load_state_dict({("start." if k[0] in "tp" else "") + k: x for k, x in state.items()})
    return model


def write(model, text, length, seed):
    """Yield characters that may follow text, by chance."""
    chance = torch.Generator().manual_seed(seed)
    ids = torch.tensor([[VOCABULARY.index(c) for c in text]])
    for _ in range(length):
        ids = torch.multinomial((model(ids)[:, -1] / 0.5).softmax(1), 1, generator=chance)
        yield VOCABULARY[ids]


parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--server", help="its address")
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()
bottom, _, top = split(writer(), "1", "3")
texts = []
with torch.no_grad(), tf.connect(args.server) as client, client.sequence("text-trunk", max_rows=512) as trunk:
    for name, model in {"split": lambda ids: top(trunk.step(bottom(ids))), "not split": writer()}.items():
        print(START, end="")
        begin, text = time.perf_counter(), ""
        for c in write(model, START, LENGTH, args.seed):
            print(c, end="", flush=True)
            text += c
        print(f"\n{name}: {LENGTH / (time.perf_counter() - begin):.0f} tokens/s\n")
        texts.append(text)
assert texts[0] == texts[1]
