"""Micro-batches through a trunk on a server: with several on their way, the sides and the network work at a time."""

import time

import torch
from torch import nn
from train_shared import data, server

import tensorferry as tf
from tensorferry.torch import RemoteModule, RemoteOptimizer

EPOCHS, MICRO, BATCH = 6, 8, 20  # MICRO micro-batches of BATCH images are a step


def make_trunk():
    """Return the module that the server trains."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())


def train(trunk, depth, x, y):
    """Train from the start with so many micro-batches on their way; return the losses and images a second."""
    torch.manual_seed(2)
    bottom, top = nn.Sequential(nn.Linear(784, 128), nn.ReLU()), nn.Linear(128, 10)
    trunk.load_state_dict(make_trunk().state_dict())
    # SGD without momentum has no state that the next training would find on the server.
    optimizers = [
        torch.optim.SGD([*bottom.parameters(), *top.parameters()], lr=0.3),
        RemoteOptimizer(trunk.parameters(), "sgd", lr=0.3),
    ]
    losses, begin = [], time.perf_counter()
    for _ in range(EPOCHS):
        for xs, ys in zip(x.split(MICRO * BATCH), y.split(MICRO * BATCH)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            labels = ys.split(BATCH)
            with trunk.pipeline(depth) as through:
                for i, h in enumerate(through(bottom(part) for part in xs.split(BATCH))):
                    loss = nn.functional.cross_entropy(top(h), labels[i]) / MICRO
                    loss.backward()  # to h; the trunk's and the bottom's gradients come while the loop goes on
                    losses.append(loss.item() * MICRO)
            for optimizer in optimizers:
                optimizer.step()
    return losses, EPOCHS * len(x) / (time.perf_counter() - begin)


def main():
    torch.set_num_threads(1)
    x, y, _, _ = data()
    with server("train_pipeline:make_trunk") as (_, address), tf.connect(address) as client:
        trunk = RemoteModule(client, "trunk")
        with trunk.training():
            results = {depth: train(trunk, depth, x, y) for depth in (1, 4)}
    for depth, (losses, rate) in results.items():
        print(f"depth {depth}: {rate:.0f} images/s, loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last")
    print("on one machine there is little to hide: the two sides work at a time, if it has the cores for both")
    assert results[1][0] == results[4][0]


if __name__ == "__main__":
    main()
