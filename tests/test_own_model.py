"""Somebody's own model: the loop of one device on many, nnx and functional, equal and in place."""

import difflib
import runpy
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardtrain as st
from shardtrain.train.own_model import RESTS

EXAMPLES = Path(__file__).parent.parent / "examples"
BATCH, IN, HIDDEN, OUT = 32, 16, 64, 8
MESHES = {
    "8": {},
    "4x2": {"tensor": 2},
    "2x4": {"replica": 2},
}


@pytest.fixture(autouse=True)
def promotion_as_users_have_it():
    with jax.numpy_dtype_promotion("standard"):
        yield


# -- the example


def losses_of(name: str, capsys: pytest.CaptureFixture[str]) -> list[float]:
    runpy.run_path(str(EXAMPLES / name))
    return [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]


def test_three_lines_make_the_example_one_of_many_devices(capsys):
    one, many = (
        (EXAMPLES / f"{n}_device{s}.py").read_text() for n, s in (("one", ""), ("many", "s"))
    )
    changed = [
        line for line in difflib.ndiff(one.splitlines(), many.splitlines()) if line.startswith("+ ")
    ]
    assert len(changed) == 3
    assert len([line for line in one.splitlines() if line.strip()]) <= 30
    readme = (EXAMPLES.parent / "README.md").read_text()
    assert f"```python\n{one}```" in readme
    assert all(f"\n+{line[2:]}\n" in readme for line in changed)
    want, got = losses_of("one_device.py", capsys), losses_of("many_devices.py", capsys)
    assert len(want) == 20
    assert want[-1] < want[0] / 2
    np.testing.assert_allclose(got, want, rtol=1e-5)


# -- nnx


class Net(nnx.Module):
    """Something of everything: names, batch statistics, dropout, a bias that does not divide."""

    def __init__(self, rngs: nnx.Rngs, *, names: bool = True) -> None:
        init = nnx.initializers.lecun_normal()
        named = partial(nnx.with_partitioning, init, eager_sharding=False)
        # no bias: the norm takes it away, so that its gradient would be rounding only
        kernel_init = named(("embed", "mlp")) if names else init
        self.up = nnx.Linear(IN, HIDDEN, use_bias=False, kernel_init=kernel_init, rngs=rngs)
        self.norm = nnx.BatchNorm(HIDDEN, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.down = nnx.Linear(
            HIDDEN, OUT, kernel_init=named(("tensor", None)) if names else init, rngs=rngs
        )
        self.odd = nnx.Param(jnp.ones(3))

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.dropout(nnx.relu(self.norm(self.up(x))))
        return self.down(h) * self.odd[...].mean()


def make(*, names: bool = True) -> tuple[Net, nnx.Optimizer]:
    model = Net(nnx.Rngs(0, dropout=1), names=names)
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


def update(model, optimizer, x, y):
    def loss_of(model):
        return jnp.mean((model(x) - y) ** 2)

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def batches(count: int = 4):
    rng = np.random.default_rng(0)
    for _ in range(count):
        x = rng.normal(size=(BATCH, IN)).astype(np.float32)
        yield x, np.tanh(x[:, :OUT])


def values(*nodes: nnx.Pytree) -> dict[str, np.ndarray]:
    """The numbers of every variable."""
    return {
        "/".join(map(str, path)): np.asarray(
            jax.random.key_data(v.get_value())
            if jnp.issubdtype(v.get_value().dtype, jax.dtypes.prng_key)
            else v.get_value()
        )
        for path, v in nnx.iter_graph(nodes)
        if isinstance(v, nnx.Variable)
    }


def shardings(*nodes: nnx.Pytree) -> list[tuple[jax.sharding.Sharding, jax.sharding.Sharding]]:
    """Where each variable lies, and where it was put."""
    return [
        (v.get_value().sharding, v.get_metadata(RESTS))
        for _, v in nnx.iter_graph(nodes)
        if isinstance(v, nnx.Variable)
    ]


def device_bytes(node: nnx.Pytree, kind: type[nnx.Variable]) -> int:
    """Bytes on one device."""
    arrays = [v.get_value() for _, v in nnx.iter_graph(node) if isinstance(v, kind)]
    return sum(a.addressable_shards[0].data.nbytes for a in arrays)


@pytest.fixture(scope="module")
def reference():
    with jax.numpy_dtype_promotion("standard"):
        model, optimizer = make()
        step = nnx.jit(update)
        losses = [float(step(model, optimizer, x, y)) for x, y in batches()]
        return losses, values(model, optimizer)


@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.campaign), 1, 3])
@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_and_stage_is_one_device(mesh, zero, reference):
    model, optimizer = st.place(make(), st.make_mesh(**MESHES[mesh]), zero=zero)
    before = shardings(model, optimizer)
    traces = []

    @st.jit
    def step(model, optimizer, x, y):
        traces.append(1)
        return update(model, optimizer, x, y)

    losses = [float(step(model, optimizer, x, y)) for x, y in batches()]
    want_losses, want = reference
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    got = values(model, optimizer)
    assert got.keys() == want.keys()
    for path, value in got.items():
        np.testing.assert_allclose(value, want[path], rtol=1e-4, atol=1e-5, err_msg=path)
    # nothing has moved, and nothing was compiled twice
    for (now, rests), (then, _) in zip(shardings(model, optimizer), before, strict=True):
        assert now.is_equivalent_to(rests, 8) or now == rests
        assert now.is_equivalent_to(then, 8) or now == then
    assert len(traces) == 1


def test_zero_divides_the_bytes_of_a_device():
    counts = {}
    for zero in (0, 1, 2, 3):
        model, optimizer = st.place(make(names=False), st.make_mesh(), zero=zero)
        counts[zero] = device_bytes(model, nnx.Param), device_bytes(optimizer, nnx.OptState)
    params = 4 * (IN * HIDDEN + 2 * HIDDEN + HIDDEN * OUT + OUT + 3)
    odd, steps = 4 * 3, 2 * 4  # three numbers do not divide by eight
    assert counts[0] == (params, 2 * params + steps)
    split = (params - odd) // 8 + odd
    assert counts[1] == counts[2] == (params, 2 * split + steps)
    assert counts[3] == (split, 2 * split + steps)


def test_names_split_parameters_over_the_mesh():
    model, optimizer = st.place(make(), st.make_mesh(tensor=2), zero=1)
    spec = jax.sharding.PartitionSpec
    assert model.up.kernel.get_value().sharding.spec == spec(None, "tensor")
    assert model.down.kernel.get_value().sharding.spec == spec("tensor", None)
    moments = optimizer.opt_state[0].mu
    assert moments["up"]["kernel"].get_value().sharding.spec == spec("data", "tensor")
    assert moments["norm"]["bias"].get_value().sharding.spec == spec("data")


def test_without_it_state_drifts():
    """What `jit` is for: under `nnx.jit` XLA puts results where it likes."""
    model, optimizer = st.place(make(), st.make_mesh(tensor=2), zero=1)
    step = nnx.jit(update)
    for x, y in batches(1):
        step(model, optimizer, *st.place_batch((x, y), st.make_mesh(tensor=2)))
    assert any(not now.is_equivalent_to(rests, 1) for now, rests in shardings(model, optimizer))


def test_jit_takes_what_nnx_jit_takes(reference):
    model, optimizer = st.place(make(), st.make_mesh(), zero=1)

    @st.jit(static_argnames="scale", donate_argnums=(0, 1))
    def step(model, optimizer, x, y, *, scale, weights=None):
        assert isinstance(scale, str)
        assert weights is None or weights.shape == (3,)
        return update(model, optimizer, x, y), model.up.kernel[...].sum()

    losses = []
    for x, y in batches():
        loss, total = step(model, optimizer, jnp.asarray(x), y, scale="a", weights=np.ones(3))
        losses.append(float(loss))
        assert np.isfinite(total)
    np.testing.assert_allclose(losses, reference[0], rtol=1e-5)


def test_jit_without_placed_modules_is_that_of_nnx(reference):
    model, optimizer = make()
    step = st.jit(update)
    losses = [float(step(model, optimizer, x, y)) for x, y in batches()]
    np.testing.assert_allclose(losses, reference[0], rtol=1e-6)
    assert len(model.up.kernel.get_value().sharding.device_set) == 1


def test_an_optimizer_made_after_placing_goes_along():
    model = st.place(make()[0], st.make_mesh(tensor=2))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    step = st.jit(update)
    for x, y in batches(2):
        loss = step(model, optimizer, x, y)
    assert np.isfinite(loss)
    kernel = optimizer.opt_state[0].mu["up"]["kernel"].get_value()
    assert kernel.sharding.spec == jax.sharding.PartitionSpec(None, "tensor")


def test_state_of_nnx_and_plain_trees_are_placed():
    mesh = st.make_mesh()
    state = st.place(nnx.state(make(names=False)[0], nnx.Param), mesh, zero=3)
    assert state["up"]["kernel"].get_value().sharding.spec[1] == "data"
    tree = st.place({"a": np.ones((4, 16), np.float32), "b": np.float32(1)}, mesh, zero=3)
    assert tree["a"].sharding.spec == jax.sharding.PartitionSpec(None, "data")
    assert tree["b"].sharding.is_fully_replicated
    assert st.place({"a": np.ones(16)}, mesh)["a"].sharding.is_fully_replicated


def test_a_batch_is_shared_out():
    mesh = st.make_mesh(data=2, replica=2, tensor=2)
    batch = {"x": np.ones((BATCH, 3)), "key": jax.random.key(0), "scale": 2.0}
    placed = st.place_batch(batch, mesh)
    assert placed["x"].addressable_shards[0].data.shape == (BATCH // 4, 3)
    assert placed["key"].sharding.is_fully_replicated
    assert float(placed["scale"]) == 2.0


# -- refusals


def linear(*names: str | None, width: int = 8) -> nnx.Linear:
    init = nnx.with_partitioning(nnx.initializers.ones, names, eager_sharding=False)
    return nnx.Linear(8, width, kernel_init=init, rngs=nnx.Rngs(0))


def test_wrong_layouts_are_refused():
    mesh = st.make_mesh(tensor=4)
    with pytest.raises(st.ShardingError, match="unknown axis name of kernel\n  value: width"):
        st.place(linear("embed", "width"), mesh)
    with pytest.raises(st.ShardingError, match="the mlp axis of kernel has 6 entries"):
        st.place(linear("embed", "mlp", width=6), mesh)
    with pytest.raises(st.ShardingError, match="more names than dims"):
        st.place(linear("embed", "mlp", "heads"), mesh)
    with pytest.raises(st.ShardingError, match="no such stage"):
        st.place(linear(), mesh, zero=4)
    with pytest.raises(st.ShardingError, match=r"make it with shardtrain\.make_mesh"):
        st.place(linear(), jax.make_mesh((8,), ("devices",)))
    with pytest.raises(st.ShardingError, match="7 samples do not divide by 2 data shards"):
        st.place_batch({"x": np.ones((7, 2))}, mesh)


# -- functional


def initial() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        "up": rng.normal(0, 0.3, (IN, HIDDEN)).astype(np.float32),
        "down": rng.normal(0, 0.3, (HIDDEN, OUT)).astype(np.float32),
        "bias": np.zeros(OUT, np.float32),
    }


NAMES = {"up": ("embed", "mlp"), "down": ("mlp", "embed"), "bias": ("embed",)}


def outputs(params, x, keys):
    h = jnp.tanh(x @ params["up"])
    mask = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, (HIDDEN,)))(keys)
    return (h * mask.astype(h.dtype)) @ params["down"] + params["bias"]


def mean_loss(params, batch, keys):
    return jnp.mean((outputs(params, batch["x"], keys) - batch["y"]) ** 2)


def counted(batch):
    return batch["counts"].sum()


def counted_loss(params, batch, keys):
    errors = ((outputs(params, batch["x"], keys) - batch["y"]) ** 2).mean(-1)
    return (errors * batch["counts"]).sum() / jnp.maximum(batch["counts"].sum(), 1)


def functional_batches():
    rng = np.random.default_rng(2)
    for x, y in batches(3):
        # the first microbatch counts little, the last much
        counts = (rng.random(BATCH) < np.arange(BATCH) / BATCH).astype(np.float32)
        yield {"x": x, "y": y, "counts": counts}


def plain_loop(loss):
    """Optax by hand, on one device."""
    transform, params = optax.adamw(1e-2), initial()
    state, key, losses = transform.init(params), jax.random.key(0), []

    @jax.jit
    def step(params, state, batch, number):
        rows = jnp.arange(BATCH, dtype=jnp.uint32)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, number), rows)
        value, grads = jax.value_and_grad(loss)(params, batch, keys)
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    for number, batch in enumerate(functional_batches()):
        params, state, value = step(params, state, batch, number)
        losses.append(float(value))
    return losses, params


@pytest.mark.parametrize(
    ("mesh", "zero", "microbatches", "weighted"),
    [
        ("8", 0, 1, False),
        ("8", 1, 4, True),
        ("4x2", 0, 4, True),
        ("4x2", 2, 2, True),
        ("4x2", 3, 1, True),
        ("2x4", 3, 4, False),
        ("2x4", 1, 1, True),
    ],
)
def test_the_functional_step_is_that_of_one_device(mesh, zero, microbatches, weighted):
    loss, weight = (counted_loss, counted) if weighted else (mean_loss, None)
    step = st.make_train_step(
        loss,
        optax.adamw(1e-2),
        initial(),
        st.make_mesh(**MESHES[mesh]),
        names=NAMES,
        zero=zero,
        microbatches=microbatches,
        weight=weight,
    )
    state = step.init(initial())
    losses = []
    for batch in functional_batches():
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    want, params = plain_loop(loss)
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    for name, value in state.params.items():
        np.testing.assert_allclose(value, params[name], rtol=1e-4, atol=1e-6, err_msg=name)
    assert int(state.step) == 3
    assert metrics.keys() == {"loss", "grad_norm"}
    assert jax.tree.map(lambda x: x.sharding, state) == step.shardings
    shards = {"8": 8, "4x2": 4, "2x4": 4}[mesh] if zero else 1
    tensor = 2 if mesh == "4x2" else 1
    moment = state.opt_state["transform"][0][0].mu["up"]
    assert moment.addressable_shards[0].data.size == IN * HIDDEN // shards // tensor


def test_parameters_of_nnx_keep_their_names():
    graph, params, rest = nnx.split(make()[0], nnx.Param, ...)
    rest = nnx.to_pure_dict(rest)

    def loss(params, batch, keys):
        model = nnx.merge(graph, params, rest)
        model.eval()
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    step = st.make_train_step(
        loss, optax.adam(1e-2), params, st.make_mesh(tensor=2), zero=1, precision="bfloat16"
    )
    state = step.init(params)
    losses = []
    for x, y in [next(batches())] * 8:
        state, metrics = step(state, {"x": x, "y": y})
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    assert state.params["up"]["kernel"].dtype == jnp.bfloat16
    assert state.opt_state["master"]["up"]["kernel"].dtype == jnp.float32
    spec = jax.sharding.PartitionSpec
    assert state.params["up"]["kernel"].sharding.spec == spec(None, "tensor")
    assert state.opt_state["master"]["up"]["kernel"].sharding.spec == spec("data", "tensor")


def test_mixes_rest_as_they_say_and_round_by_chance():
    """Two steps of two seeds round apart; wide parameters are cast inside, and learn."""

    def trained(precision, seed=0):
        step = st.make_train_step(
            mean_loss, optax.adam(1e-2), initial(), st.make_mesh(), precision=precision, seed=seed
        )
        state = step.init(initial())
        for x, y in [next(batches())] * 2:
            state, _ = step(state, {"x": x, "y": y})
        return state

    narrow = "bfloat16,master=bfloat16,moments=bfloat16,rounding=stochastic"
    one, same, other = (jax.device_get(trained(narrow, seed)) for seed in (0, 0, 1))
    kinds = {leaf.dtype for leaf in jax.tree.leaves((one.params, one.opt_state)) if leaf.ndim}
    assert kinds == {jnp.dtype(jnp.bfloat16)}
    bits = [b"".join(x.tobytes() for x in jax.tree.leaves(s.params)) for s in (one, same, other)]
    assert bits[0] == bits[1] != bits[2]
    wide = trained("params=float32,compute=bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(wide.params)} == {jnp.dtype(jnp.float32)}


def test_wrong_steps_are_refused():
    make_step = partial(st.make_train_step, mean_loss, optax.sgd(0.1), initial())
    with pytest.raises(st.ShardingError, match="unknown axis name of up"):
        make_step(st.make_mesh(), names=NAMES | {"up": ("in", "out")})
    with pytest.raises(st.ConfigError, match="unknown precision"):
        make_step(st.make_mesh(), precision="float8")
    with pytest.raises(st.ConfigError, match="which products of a loss are in fp8"):
        make_step(st.make_mesh(), precision="fp8")
    with pytest.raises(st.ConfigError, match="at ZeRO 2 gradients are reduced as they are made"):
        make_step(st.make_mesh(), zero=2, precision="bfloat16,reduce=float32")
    step = make_step(st.make_mesh(), microbatches=3)
    state = step.init(initial())
    message = "32 samples do not divide by 3 microbatches x 8 data shards"
    with pytest.raises(st.ShardingError, match=message):
        step(state, next(functional_batches()))


@pytest.mark.parametrize("window", [1, 3])
def test_accumulated_gradients_of_convolutions_are_those_of_the_whole_batch(window: int) -> None:
    """One sample a shard: XLA partitions the mapped gradient of a window wrongly."""
    random = np.random.default_rng(0)
    batch = {"x": random.normal(size=(16, 6, 6, 4)), "y": random.normal(size=(16, 6, 6, 8))}
    batch = {name: x.astype(np.float32) for name, x in batch.items()}
    params = {"w": random.normal(size=(window, window, 4, 8)).astype(np.float32)}

    def loss(params: Any, batch: Any, keys: Any) -> jax.Array:
        made = jax.lax.conv_general_dilated(
            batch["x"],
            params["w"],
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            precision="highest",
        )
        return ((made - batch["y"]) ** 2).mean()

    step = st.make_train_step(loss, optax.sgd(1.0), params, st.make_mesh(), microbatches=2)
    state, _ = step(step.init(params), batch)
    expected = params["w"] - jax.grad(loss)(params, batch, None)["w"]
    np.testing.assert_allclose(np.asarray(state.params["w"]), expected, rtol=1e-4, atol=1e-5)
