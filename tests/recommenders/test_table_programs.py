"""What a step with tables does: which arrays it makes, what it sends, which rows it touches."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recommenders import SIZES, Case, program_of, put, rows

from shardtrain.config import load_config
from shardtrain.errors import ConfigError
from shardtrain.models.table_layout import lay_out
from shardtrain.ops.tables import look_up, summed
from shardtrain.run_program import lower_step
from shardtrain.sharding.placement import leaves_by_path

DP8 = (("data", 8),)
LARGE = [size * 5000 for size in SIZES[:2]] + [5] + [size * 5000 for size in SIZES[3:]]
SENT = {"rows": "reduce-scatter", "columns": "all-to-all", "tables": "all-to-all"}


@pytest.mark.parametrize("kind", ["rows", "columns", "tables"])
def test_nothing_of_a_tables_size_is_made_or_sent(kind: str) -> None:
    """Tables and their cells are updated in place; only rows of the batch travel."""
    sections = Case(DP8, placement=kind, precision="float32", zero=1).sections()
    sections["model"]["table_sizes"] = LARGE
    compiled = lower_step(jax.devices(), load_config(sections), 1).compile()
    memory = compiled.memory_analysis()
    assert memory.argument_size_in_bytes > 5_000_000
    assert memory.temp_size_in_bytes < 100_000
    # All but the batch is given up to its successor.
    assert memory.alias_size_in_bytes > memory.argument_size_in_bytes - 1000
    lines = [line for line in compiled.as_text().splitlines() if _collective(line)]
    assert any(f" {SENT[kind]}(" in line for line in lines)
    assert max(max(_sizes(line)) for line in lines) <= 32 * 6 * 16 * 8


def _collective(line: str) -> bool:
    return bool(re.search(r" (all-gather|all-reduce|reduce-scatter|all-to-all)\(", line))


def _sizes(line: str) -> list[int]:
    """Entries of every array that a line of a program names."""
    shapes = re.findall(r"[fsu]\d+\[([\d,]*)\]", line)
    return [int(np.prod([int(n) for n in shape.split(",") if n] or [1])) for shape in shapes]


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "sgd"])
def test_only_rows_that_were_read_move_and_by_the_sum_of_their_gradients(optimizer: str) -> None:
    """Against the formula, from the gradient of a loss that looks rows up in whole tables."""
    case = Case(placement="rows", precision="float32", clip=0.0, table_optimizer=optimizer)
    program, batch = program_of(case), rows(0)
    state = program.init()
    before = jax.device_get(state.params)["banks"]["rows"]
    task, key = program.task, jax.random.key(0)
    placed = put(program, batch)

    def loss(params: dict) -> jax.Array:
        part = {name: x[0] for name, x in placed.items()}
        sums = program.parts.sums(params, None, {}, part, key, None)
        return sums["log_loss"] / task.totals(placed)["log_loss"]

    dense = jax.device_get(jax.grad(loss)(state.params))["banks"]["rows"]
    state, metrics, grads = program.step_with_gradients(state, placed)
    np.testing.assert_allclose(grads["banks"]["rows"], dense, rtol=1e-4, atol=1e-7)
    after = jax.device_get(state.params)["banks"]["rows"]
    offsets, size = np.array([0, 40, 64, 95, 112]), len(before)
    fields = [0, 1, 3, 4, 5]
    read = np.zeros(size, bool)
    read[(batch["ids"][:, fields] + offsets).ravel()] = True
    np.testing.assert_array_equal(after[~read], before[~read])
    rate = 10.0 * float(metrics["learning_rate"])
    if optimizer == "sgd":
        np.testing.assert_allclose(after, before - rate * dense, rtol=1e-3, atol=1e-6)
        return
    cells = jax.device_get(state.opt_state["transform"]["tables"]["banks"]["rows"])
    np.testing.assert_allclose(cells[:, 0], np.square(dense).mean(1), rtol=1e-3, atol=1e-12)
    wanted = before - rate * dense / (np.sqrt(cells) + 1e-8)
    np.testing.assert_allclose(after, wanted, rtol=1e-3, atol=1e-4)
    assert not cells[~read].any()


def test_the_norm_that_clips_has_each_row_once() -> None:
    program = program_of(Case(placement="rows", precision="float32", clip=0.01))
    _, metrics, grads = program.step_with_gradients(program.init(), put(program, rows(0)))
    squares = [
        np.sum(np.square(g, dtype=np.float64)) for g in jax.tree.leaves(jax.device_get(grads))
    ]
    np.testing.assert_allclose(metrics["grad_norm"], np.sqrt(sum(squares)), rtol=1e-5)


def test_a_batch_that_is_no_number_leaves_tables_and_cells_alone() -> None:
    case = Case(DP8, placement="rows", zero=3, precision="float32", guard="skip")
    program, batch = program_of(case), rows(0)
    state = program.init()
    before = jax.device_get((state.params, state.opt_state))
    batch["dense"][3] = np.nan
    batch["weights"][3] = 1.0
    state, metrics, _ = program.step_with_gradients(state, put(program, batch))
    assert not metrics["moved"]
    assert (int(state.step), int(state.cursor)) == (0, 1)
    jax.tree.map(
        np.testing.assert_array_equal, before, jax.device_get((state.params, state.opt_state))
    )


def test_frozen_tables_do_not_move_and_have_no_state() -> None:
    program = program_of(Case(DP8, placement="rows", precision="float32", freeze=True))
    state = program.init()
    before = jax.device_get(state.frozen)
    assert {path.split("/")[1] for path, _ in leaves_by_path(before)} == {"dense", "rows"}
    new, _, grads = program.step_with_gradients(state, put(program, rows(0)))
    assert "banks" not in grads
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(new.frozen))
    assert "banks" not in {path.split("/")[-2] for path, _ in leaves_by_path(new.opt_state)}


def test_ids_are_summed_once_each_also_all_equal_and_none() -> None:
    ids, total = summed(jnp.array([7, 7, 7, 7]), jnp.ones((4, 2)), 9)
    assert ids.tolist() == [7, 10, 11, 12]
    assert total.tolist() == [[4, 4], [0, 0], [0, 0], [0, 0]]
    ids, total = summed(jnp.array([9, 9]), jnp.zeros((2, 1)), 9)
    assert ids.tolist() == [9, 10]
    assert not total.any()


def test_rows_beyond_32_bits_are_refused_and_entries_beyond_them_are_not() -> None:
    """O-23: what is numbered is a row, never an entry; and rows of a bank fit 32 bits."""
    layout = lay_out([2**30, 2**29], 128, placement="columns", dense_rows=0, parts=8)
    bank = layout.split[0]
    assert bank.rows * layout.width > 2**31
    last = bank.ids(np.array([[2**30 - 1, 2**29 - 1]], np.int32), np.where)
    assert last.dtype == np.int32
    assert last.tolist() == [[2**30 - 1, 2**30 + 2**29 - 1]]
    table = jax.ShapeDtypeStruct((bank.rows, layout.width), jnp.float32)
    ids = jax.ShapeDtypeStruct((4, 2), jnp.int32)
    found = jax.eval_shape(lambda t, i: look_up(t, i, split="columns"), table, ids)
    assert found.shape == (4, 2, 128)
    with pytest.raises(ConfigError, match="more rows together than 32 bits can number"):
        lay_out([2**30, 2**30], 128, placement="columns", dense_rows=0, parts=8)


def test_tables_go_by_size() -> None:
    """Small ones stay whole, fair shares go whole to one device, what is larger is split."""
    sizes = [100_000, 50, *[900 + 10 * i for i in range(16)]]
    layout = lay_out(sizes, 128, placement="auto", dense_rows=64, parts=8)
    kinds = {bank.kind: bank for bank in layout.banks}
    assert kinds["dense"].slots == (1,)
    assert kinds["columns"].slots == (0,)
    whole = kinds["tables"]
    assert sorted(whole.slots) == list(range(2, 18))  # two to each part, none left over
    block = whole.rows // 8
    assert block == max(
        sizes[a] + sizes[b] for a, b in zip(whole.slots[::2], whole.slots[1::2], strict=True)
    )
    for slot, (field, first) in enumerate(zip(whole.slots, whole.offsets, strict=True)):
        assert first // block == (first + sizes[field] - 1) // block == slot // 2
    narrow = lay_out(sizes, 16, placement="auto", dense_rows=64, parts=8)
    assert [bank.kind for bank in narrow.banks] == ["dense", "rows", "tables"]
    assert sorted(layout.order) == list(range(18))
