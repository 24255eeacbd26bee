"""Split training: the bottom and the top of a network train here, its trunk on a server, as if it stood here.

The same network is trained beside it without a server, and learns the same. After a crash, --resume goes on:

    python train_split.py --checkpoint /tmp/run --crash-at 70
    python train_split.py --checkpoint /tmp/run --resume --plot loss.png
"""

import argparse
import os
import pathlib

import torch
from torch import nn
from train_shared import TRAIN, accuracy, data, plot, save, server

import tensorferry as tf
from tensorferry.torch import RemoteModule, RemoteOptimizer

BATCH = 20
SAVE_EVERY = 20  # steps, here and on the server
# The bottom, the trunk and the top of a network.
MODELS = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(784, 128), nn.BatchNorm1d(128), nn.ReLU()),
        lambda: nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU()),
        lambda: nn.Linear(128, 10),
    ),
    "conv": (
        lambda: nn.Sequential(nn.Unflatten(1, (1, 28, 28)), nn.Conv2d(1, 16, 5, 2, 2), nn.ReLU()),
        lambda: nn.Sequential(nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU()),
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(32 * 49, 10)),
    ),
}


def make(model, part):
    torch.manual_seed(part)  # the server's process makes the trunk of the same numbers
    return MODELS[model][part]()


def make_trunk():
    """Return the module that the server trains."""
    return make(os.environ["MODEL"], 1)


def train(network, optimizers, batches, said, after):
    """Train from where said ends, which gets the loss of each step and the accuracy after each epoch."""
    x, y, test_x, test_y = data()
    for step in range(len(said["losses"]), len(batches)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(x[batches[step]]), y[batches[step]])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        said["losses"].append(loss.item())
        if (step + 1) * BATCH % TRAIN == 0:
            said["accuracy"].append(accuracy(network, test_x, test_y))
        after(step + 1)


def main():
    parser = argparse.ArgumentParser(description="Train a network whose trunk is on a server.")
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--server", metavar="ADDRESS", help="a server that trains make_trunk of this file as trunk")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the losses: unsplit wide and gray, split red on it")
    parser.add_argument("--checkpoint", type=pathlib.Path, metavar="DIR", help="save checkpoints, the server too")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoints in DIR")
    parser.add_argument("--crash-at", type=int, metavar="STEP", help="kill server and client, to try --resume")
    options = parser.parse_args()
    torch.set_num_threads(1)

    # A generator of its own: each forward pass through the server draws a seed from torch's.
    order = torch.Generator().manual_seed(2)
    batches = [b for _ in range(options.epochs) for b in torch.randperm(TRAIN, generator=order).split(BATCH)]

    whole = nn.Sequential(*[make(options.model, part) for part in range(3)])
    unsplit, split = ({"losses": [], "accuracy": []} for _ in range(2))
    train(whole, [torch.optim.Adam(whole.parameters(), lr=1e-3)], batches, unsplit, lambda step: None)

    bottom, top = make(options.model, 0), make(options.model, 2)
    adam = torch.optim.Adam([*bottom.parameters(), *top.parameters()], lr=1e-3)
    mine = {"bottom": bottom, "top": top, "optimizer": adam}
    trunk = "train_split:make_trunk"
    if options.checkpoint:
        trunk += f",checkpoint={options.checkpoint},checkpoint-every={SAVE_EVERY}"
    serving = server(trunk, "--python-env", f"MODEL={options.model}", at=options.server)
    with serving as (process, address), tf.connect(address) as client:
        trunk = RemoteModule(client, "trunk")

        def after(step):
            if options.checkpoint and step % SAVE_EVERY == 0:
                states = {name: part.state_dict() for name, part in mine.items()}
                save({"step": step, "split": split, **states}, options.checkpoint / "client.pt")
            if step == options.crash_at:
                process.kill()
                os._exit(9)

        with trunk.training():
            if options.resume:
                saved = torch.load(options.checkpoint / "client.pt")
                # The server saves first and keeps two checkpoints, so it has that of this side's only one.
                if trunk.step != saved["step"]:
                    trunk.rewind(saved["step"])
                for name, part in mine.items():
                    part.load_state_dict(saved[name])
                split = saved["split"]
                print(f"resumed at step {saved['step']}")
            elif trunk.step:
                raise SystemExit(f"the server's trunk has taken {trunk.step} steps: start it anew, or give --resume")
            optimizers = [adam, RemoteOptimizer(trunk.parameters(), "adam", lr=1e-3)]
            train(nn.Sequential(bottom, trunk, top), optimizers, batches, split, after)

    steps = TRAIN // BATCH
    for e, (a, b) in enumerate(zip(split["accuracy"], unsplit["accuracy"])):
        mean, beside = (sum(s["losses"][e * steps : (e + 1) * steps]) / steps for s in (split, unsplit))
        print(f"epoch {e + 1}: loss {mean:.4f} split, {beside:.4f} unsplit; accuracy {a:.1%} and {b:.1%}")
    if options.plot:
        plot(options.plot, [(unsplit["losses"], (190, 190, 190), 7), (split["losses"], (200, 0, 0), 2)])
    # A server that others started may have another CPU, or more threads, which add in another order.
    most = 0.1 if options.server else 0.0
    assert max(abs(a - b) for a, b in zip(split["losses"], unsplit["losses"])) <= most
    assert options.epochs < 3 or split["accuracy"][2] >= 0.7


if __name__ == "__main__":
    main()
