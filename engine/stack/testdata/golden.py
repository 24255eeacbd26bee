#!/usr/bin/env python3
"""Writes what torch makes of the layers of a transformer, computed in float64.

    apt-get install python3-torch
    /usr/bin/python3 engine/stack/testdata/golden.py engine/stack/testdata/golden

Each file of the folder is a case: its weights, the inputs "x" and perhaps "mask", the result "y"
(float64), and in the metadata the "spec", as model.json has it. Weights and inputs are random
float32, from a fixed seed.
"""

import json
import pathlib
import struct
import sys

import torch
from torch import nn
from torch.nn import functional as f

WIDTH = 12
HEADS = 3
VOCABULARY = 31
NAMES = {torch.float32: "F32", torch.float64: "F64", torch.int32: "I32", torch.int64: "I64", torch.bool: "BOOL", torch.uint8: "U8"}
ACTIVATIONS = {
    "relu": torch.relu,
    "gelu": f.gelu,
    "gelu_tanh": lambda x: f.gelu(x, approximate="tanh"),
    "silu": f.silu,
    "sigmoid": torch.sigmoid,
}


def numbers(*shape):
    """Returns normal numbers that are float32, as float64."""
    return torch.randn(*shape, dtype=torch.float32).double()


def attend(x, w, heads, causal, mask):
    """Is torch's attention, but for what it makes NaN of: positions that nothing is left to attend to."""
    m = nn.MultiheadAttention(x.shape[-1], heads, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        m.in_proj_weight.copy_(w["in.weight"])
        m.in_proj_bias.copy_(w["in.bias"])
        m.out_proj.weight.copy_(w["out.weight"])
        m.out_proj.bias.copy_(w["out.bias"])
        n = x.shape[1]
        later = torch.ones(n, n, dtype=torch.bool).triu(1) if causal else torch.zeros(n, n, dtype=torch.bool)
        unseen = later.expand(len(x), n, n)
        if mask is not None:
            unseen = unseen | (mask == 0)[:, None, :]
        y, _ = m(x, x, x, attn_mask=later, key_padding_mask=None if mask is None else mask == 0, need_weights=False)
    blind = unseen.all(-1)
    if not torch.equal(blind, y.isnan().any(-1)):
        raise SystemExit("torch has NaN in other places than expected")
    return torch.where(blind[..., None], w["out.bias"], y)


def attention_weights(width):
    return {
        "in.weight": numbers(3 * width, width) / 2, "in.bias": numbers(3 * width),
        "out.weight": numbers(width, width) / 2, "out.bias": numbers(width),
    }  # fmt: skip


def attention_layer(heads, causal):
    layer = {"kind": "attention", "heads": heads, "weight": "in.weight", "bias": "in.bias", "out_weight": "out.weight", "out_bias": "out.bias"}
    return layer | ({"causal": True} if causal else {})


def padding(items, positions):
    """Pads the first item at its end, the second at its beginning, the third nowhere, the last wholly."""
    mask = torch.ones(items, positions)
    mask[0, positions // 2 :] = 0
    mask[1, : positions // 3] = 0
    mask[-1] = 0
    return mask


def attentions():
    for positions in (7, 70):  # 70 are two tiles of queries
        for causal in (False, True):
            for masked in (None, torch.bool, torch.uint8):
                if positions == 70 and masked == torch.uint8:
                    continue
                x, w = numbers(4, positions, WIDTH), attention_weights(WIDTH)
                mask = None if masked is None else padding(4, positions).to(masked)
                name = f"attention-{positions}" + "-causal" * causal + ("" if masked is None else "-" + str(masked).split(".")[1])
                yield name, [attention_layer(HEADS, causal)], w, x, mask, attend(x, w, HEADS, causal, mask)


def gates():
    for name, act in ACTIVATIONS.items():
        x = 4 * numbers(2, 9, 10)
        first, second = x.chunk(2, dim=-1)
        yield "gated-" + name.replace("_", "-"), [{"kind": "gated", "activation": name}], {}, x, None, act(first) * second


def embeddings():
    for dtype in (torch.int32, torch.int64):
        x = torch.randint(VOCABULARY, (3, 6), dtype=dtype)
        w = {"tokens": numbers(VOCABULARY, WIDTH), "places": numbers(8, WIDTH)}
        layers = [{"kind": "embedding", "weight": "tokens"}, {"kind": "positions", "weight": "places"}]
        yield "embedding-" + str(dtype).split(".")[1], layers, w, x, None, f.embedding(x.long(), w["tokens"]) + w["places"][:6]


def encoder():
    """Is a block that normalizes first, after an embedding."""
    x, mask = torch.randint(VOCABULARY, (4, 11)), padding(4, 11).to(torch.uint8)
    w = attention_weights(WIDTH)
    w |= {"tokens": numbers(VOCABULARY, WIDTH), "places": numbers(16, WIDTH)}
    w |= {"ln1.weight": numbers(WIDTH), "ln1.bias": numbers(WIDTH), "ln2.weight": numbers(WIDTH), "ln2.bias": numbers(WIDTH)}
    w |= {"up.weight": numbers(4 * WIDTH, WIDTH), "up.bias": numbers(4 * WIDTH), "down.weight": numbers(WIDTH, 4 * WIDTH), "down.bias": numbers(WIDTH)}
    y = f.embedding(x, w["tokens"]) + w["places"][:11]
    y = y + attend(f.layer_norm(y, (WIDTH,), w["ln1.weight"], w["ln1.bias"]), w, HEADS, False, mask)
    z = f.layer_norm(y, (WIDTH,), w["ln2.weight"], w["ln2.bias"])
    y = y + f.linear(f.gelu(f.linear(z, w["up.weight"], w["up.bias"])), w["down.weight"], w["down.bias"])
    layers = [
        {"kind": "embedding", "weight": "tokens"},
        {"kind": "positions", "weight": "places"},
        {"kind": "residual", "op": "start"},
        {"kind": "layernorm", "weight": "ln1.weight", "bias": "ln1.bias"},
        attention_layer(HEADS, False),
        {"kind": "residual", "op": "add"},
        {"kind": "residual", "op": "start"},
        {"kind": "layernorm", "weight": "ln2.weight", "bias": "ln2.bias"},
        {"kind": "linear", "weight": "up.weight", "bias": "up.bias"},
        {"kind": "gelu"},
        {"kind": "linear", "weight": "down.weight", "bias": "down.bias"},
        {"kind": "residual", "op": "add"},
    ]
    yield "encoder", layers, w, x, mask, y


def write(path, spec, tensors):
    header, data = {"__metadata__": {"spec": json.dumps(spec)}}, b""
    for name, t in sorted(tensors.items(), key=lambda e: -e[1].element_size()):  # as alignment wants it
        raw = t.contiguous().numpy().tobytes()
        header[name] = {"dtype": NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def main(folder):
    torch.manual_seed(26)
    for cases in (attentions, gates, embeddings, encoder):
        for name, layers, weights, x, mask, y in cases():
            spec = {"format": 2, "name": name, "version": "1", "layers": layers}
            tensors = {k: w.float() for k, w in weights.items()} | {"x": x.float() if x.is_floating_point() else x, "y": y}
            if not weights:
                spec["width"] = x.shape[-1]
            if mask is not None:
                spec["mask"] = True
                tensors["mask"] = mask
            write(folder / f"{name}.safetensors", spec, tensors)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(pathlib.Path(sys.argv[1]))
