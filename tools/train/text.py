#!/usr/bin/env python3
"""Trains the demo's writer, a transformer of characters: /usr/bin/python3 tools/train/text.py examples/text

It needs torch (Debian's with libopenblas0) and 20 minutes of a CPU core. Into models go three stack models of the
network, into data its vocabulary and torch.txt: START, and what torch takes for the likeliest characters after it.
"""
import bz2
import pathlib
import sys

import torch
from fashion import write_stack
from torch import nn

WIDTH, HEADS, BLOCKS, POSITIONS, STEPS, BATCH = 96, 4, 4, 512, 4000, 2048
START, LENGTH = "Sherlock Holmes ", 200


def layer(kind, name="", **fields):
    names = {field + key: f"{name}.{to}{key}" for field, to in fields.pop("of", {"": ""}).items() for key in ("weight", "bias")} if name else {}
    return {"kind": kind} | names | fields


def block(i):
    attention = layer("attention", f"{i}.self_attn", heads=HEADS, causal=True, of={"": "in_proj_", "out_": "out_proj."})
    mlp = [layer("linear", f"{i}.linear1"), layer("gelu"), layer("linear", f"{i}.linear2")]
    return [x for n, inner in ((1, [attention]), (2, mlp)) for x in (layer("residual", op="start"), layer("layernorm", f"{i}.norm{n}"), *inner, layer("residual", op="add"))]


def main(out):
    torch.manual_seed(1)
    torch.set_num_threads(1)
    text = bz2.decompress((out / "data/adventures.txt.bz2").read_bytes()).decode()
    vocabulary = sorted(set(text))
    ids = torch.tensor([vocabulary.index(c) for c in text])
    blocks = [nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, nn.functional.gelu, batch_first=True, norm_first=True) for _ in range(BLOCKS)]
    net = nn.ModuleDict({str(i): b for i, b in enumerate(blocks)} | {"norm": nn.LayerNorm(WIDTH), "head": nn.Linear(WIDTH, len(vocabulary))})
    net["tokens"], net["places"] = nn.Embedding(len(vocabulary), WIDTH), nn.Embedding(POSITIONS, WIDTH)
    nn.init.normal_(net["tokens"].weight, std=0.1)
    nn.init.normal_(net["places"].weight, std=0.02)

    def forward(x, place=0):
        n = x.shape[1]
        h = net["tokens"](x) + net["places"].weight[place : place + n]
        for b in blocks:
            h = b(h, src_mask=torch.full((n, n), -torch.inf).triu(1))
        return net["head"](net["norm"](h))

    optimizer = torch.optim.AdamW(net.parameters(), betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=STEPS, pct_start=0.05)
    for step in range(STEPS):
        n = POSITIONS // 4 if step < 0.7 * STEPS else POSITIONS  # long ones take longer, so they come last
        at = torch.randint(len(ids) - n, (BATCH // n, 1)) + torch.arange(n + 1)
        y = forward(ids[at[:, :-1]], int(torch.randint(POSITIONS - n + 1, ())))
        loss = nn.functional.cross_entropy(y.flatten(0, 1), ids[at[:, 1:]].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step} of {STEPS}: loss {loss.item():.3f}", file=sys.stderr)

    weights = {k: v if k.startswith("tokens") else v.half() for k, v in net.state_dict().items()}  # its type is that of the results
    first, last = [layer("embedding", weight="tokens.weight"), layer("positions", weight="places.weight")], [layer("layernorm", "norm"), layer("linear", "head")]
    for name, layers in {"bottom": first + block(0), "trunk": block(1) + block(2), "top": block(3) + last}.items():
        named = {v: weights[v] for each in layers for v in each.values() if v in weights}
        write_stack(out / "models" / name, {"format": 2, "name": f"text-{name}", "version": "1", "layers": layers}, named)
    net.load_state_dict({k: v.float() for k, v in weights.items()})
    x = torch.tensor([[vocabulary.index(c) for c in START]])
    with torch.no_grad():
        for _ in range(LENGTH):
            x = torch.cat([x, forward(x)[:, -1:].argmax(-1)], 1)
    for name, each in (("vocabulary", vocabulary), ("torch", [vocabulary[i] for i in x[0]])):
        (out / f"data/{name}.txt").write_text("".join(each))


if __name__ == "__main__":
    main(pathlib.Path(*sys.argv[1:]))
