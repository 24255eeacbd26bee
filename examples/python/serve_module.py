"""A torch module as a model: this process computes, and a server that it starts answers for it."""

import torch
from fashion import images, linear, predictions

import tensorferry as tf

network = torch.nn.Sequential(linear("bottom"), torch.nn.ReLU(), linear("trunk"), torch.nn.ReLU(), linear("top"))

# With rows=1 each image is independent: results stream back while images still come.
with tf.serve(network, port=0, name="fashion", rows=1) as server, tf.connect(server.address) as client:
    (model,) = (m for m in client.models() if m.name == "fashion")
    print(f"{model.about['parameters']} parameters on {model.device}")
    classes = client.compute("fashion", images()).argmax(1)

same = (classes == predictions()).sum().item()
print(f"{same} of {len(classes)} predictions are those of the demo")
assert same == len(classes)
