"""A plain training loop: two half circles of points, and a network that tells them apart. Ends with its accuracy."""

import numpy as np

from tinyforge import ParamBuffer, Stash, get_backend, ops, optim

be, rng = get_backend("numpy"), np.random.default_rng(0)
y = be.asarray(rng.integers(0, 2, (2000, 1)) * 1.0)
angle = np.pi * (y + rng.random(y.shape))
x = be.asarray(np.hstack([np.cos(angle) + y, np.sin(angle) + y / 2]) + 0.1 * rng.normal(size=(2000, 2)))
net = ops.Sequential(ops.Linear(32, 2, be), ops.ReLU(be), ops.Linear(32, 32, be), ops.ReLU(be), ops.Linear(1, 32, be))
loss, adam = ops.BinaryCrossEntropy(be), optim.AdamW(ParamBuffer(net.params(), be).initialise(seed=0), be)
for _ in range(300):
    stash = Stash()  # what forward saves for backward
    loss.forward(net.forward(x[:1000], stash), y[:1000], stash)
    adam.buffer.clear_grads()
    net.backward(loss.backward(be.asarray(np.full(1000, 1 / 1000)), stash)[0], stash)
    adam.step(0.01)
print(f"{((net.forward(x[1000:]) > 0) == y[1000:]).mean():.1%} of 1,000 new points are right")
