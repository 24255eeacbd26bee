"""Split inference: the bottom and the top of a network run here, in torch, its trunk on a server.

The server must have the trunk: tensorferry serve --model trunk=examples/fashion/models/trunk
"""

import torch
from fashion import images, linear, predictions

import tensorferry as tf

bottom = torch.nn.Sequential(linear("bottom"), torch.nn.ReLU())
top = linear("top")
with tf.connect() as client, torch.no_grad():
    hidden = bottom(images())
    hidden = client.compute("trunk", hidden)
    classes = top(hidden).argmax(1)

same = (classes == predictions()).sum().item()
print(f"{same} of {len(classes)} predictions are those of the whole network in torch")
assert same == len(classes)
