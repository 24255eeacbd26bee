"""What the benchmark of training trains, and what its server runs."""

import os
import time

import torch
from torch import nn

import tensorferry as tf

ROWS, WIDTH, HIDDEN = 20, 384, 8  # activations of 30 KB


@tf.model()
def change(x):
    """Return an input changed, as small calls do."""
    return x + 1


def small():
    """Return a small trunk, whose own work hides little of what a round costs."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))


class Trunk(nn.Module):
    """The trunk of the network that throughput is measured with."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())

    def forward(self, x):
        return self.layers(x)


def ends():
    """Return its bottom and its top."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU()), nn.Linear(128, 10)


class Pause(torch.autograd.Function):
    """Takes time in both passes, as a device does that computes while its CPU waits."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        time.sleep(ctx.seconds)
        return g.clone(), None


class Paused(nn.Module):
    """A small module that takes as long as a large one: PAUSE seconds in each pass."""

    def __init__(self, width=1024):
        super().__init__()
        torch.manual_seed(3)
        self.scale = nn.Parameter(torch.rand(width))
        self.seconds = float(os.environ.get("PAUSE", "0"))

    def forward(self, x):
        return Pause.apply(x * self.scale, self.seconds)
