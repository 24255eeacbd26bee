"""Two hospitals train one trunk in turns: images and labels stay with each, and so do its bottom and its top."""

import torch
from torch import nn
from train_shared import TRAIN, accuracy, data, server

import tensorferry as tf
from tensorferry.torch import RemoteModule, RemoteOptimizer

ROUNDS, BATCHES, BATCH = 9, 8, 20


def make_trunk():
    """Return the module that the server trains. LayerNorm keeps no statistics, which two clients would mix."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), nn.ReLU())


class Hospital:
    """A client with images of its own."""

    def __init__(self, client, x, y):
        torch.manual_seed(1)  # both begin with the same bottom, whose outputs one trunk understands
        self.x, self.y = x, y
        self.bottom = nn.Sequential(nn.Linear(784, 128), nn.LayerNorm(128), nn.ReLU())
        self.top = nn.Linear(128, 10)
        self.trunk = RemoteModule(client, "trunk")
        self.network = nn.Sequential(self.bottom, self.trunk, self.top)
        self.optimizers = [
            torch.optim.Adam([*self.bottom.parameters(), *self.top.parameters()], lr=2e-3),
            # The state of this one is the server's: both hospitals' gradients go into it.
            RemoteOptimizer(self.trunk.parameters(), "adam", lr=2e-3),
        ]
        self.order = torch.Generator().manual_seed(3)

    def turn(self):
        """Train for some batches, and return their mean loss. While one client trains, the server refuses others."""
        total = 0.0
        with self.trunk.training():
            for batch in torch.randperm(len(self.x), generator=self.order).split(BATCH)[:BATCHES]:
                for optimizer in self.optimizers:
                    optimizer.zero_grad()
                loss = nn.functional.cross_entropy(self.network(self.x[batch]), self.y[batch])
                loss.backward()
                for optimizer in self.optimizers:
                    optimizer.step()
                total += loss.item()
        return total / BATCHES


def main():
    torch.set_num_threads(1)
    x, y, test_x, test_y = data()
    half = TRAIN // 2
    with server("train_two_clients:make_trunk") as (_, address), tf.connect(address) as a, tf.connect(address) as b:
        hospitals = [Hospital(a, x[:half], y[:half]), Hospital(b, x[half:], y[half:])]
        for n in range(ROUNDS):
            losses = [hospital.turn() for hospital in hospitals]
            print(f"round {n + 1}: loss {losses[0]:.4f} and {losses[1]:.4f}")
        right = [accuracy(hospital.network, test_x, test_y) for hospital in hospitals]
    print(f"accuracy {right[0]:.1%} and {right[1]:.1%}")
    assert min(right) >= 0.65


if __name__ == "__main__":
    main()
