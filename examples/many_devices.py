"""A small classifier in flax nnx that learns what a fixed linear map says."""

import jax
import numpy as np
import optax
import shardtrain as st
from flax import nnx


class Classifier(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 256, rngs=rngs)
        self.norm = nnx.BatchNorm(256, rngs=rngs)
        self.out = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(jax.nn.relu(self.norm(self.hidden(x))))


@st.jit
def step(model, optimizer, x, y):
    def loss_of(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


model = Classifier(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
st.place((model, optimizer), st.make_mesh(), zero=1)
rng = np.random.default_rng(0)
teacher = rng.normal(size=(64, 10))
for number in range(1, 21):
    x = rng.normal(size=(128, 64)).astype(np.float32)
    print(f"step {number} loss {float(step(model, optimizer, x, (x @ teacher).argmax(1))):.6f}")
