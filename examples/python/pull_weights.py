"""Weights through the store of a server: a state_dict is pushed, and pulled into another model."""

import torch
from fashion import linear

import tensorferry as tf

trained = linear("trunk")
fresh = torch.nn.Linear(128, 128)
assert not torch.equal(fresh.weight, trained.weight)

with tf.connect() as client:
    client.push({f"trunk/{name}": value for name, value in trained.state_dict().items()})
    for stored in client.list("trunk/*"):
        print(stored.name, stored.dtype, stored.shape, stored.digest)
    pulled = client.pull("trunk/*", like="torch")
    fresh.load_state_dict({name.removeprefix("trunk/"): value for name, value in pulled.items()})

    # Into memory that is there already, without another copy in this process:
    state = {f"trunk/{name}": value for name, value in fresh.state_dict().items()}
    with torch.no_grad():
        fresh.weight.zero_()
    client.pull("trunk/*", out=state)
    client.delete("trunk/*")

assert torch.equal(fresh.weight, trained.weight)
assert torch.equal(fresh.bias, trained.bias)
