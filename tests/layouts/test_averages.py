"""An average of the parameters: the same on every layout, and what evaluation uses."""

import jax
import numpy as np
import pytest

from shardtrain.config import load_config
from shardtrain.run_program import make_program, make_report
from shardtrain.run_workload import layout_of, make_workload
from shardtrain.train.build import Program
from shardtrain.train.kept import EMA
from shardtrain.verify.compare import Subject, compare
from tests.layouts.harness import VOCAB, Case, put, synthetic_rows


def program(case: Case) -> Program:
    config = load_config(case.sections(), {"optimizer.ema_decay": 0.9})
    count = int(np.prod(list(config.mesh.model_dump().values())))
    return make_program(config, vocab_size=VOCAB, devices=jax.devices()[:count])


def subject(case: Case) -> Subject:
    made = program(case)

    def batch_at(cursor: int) -> dict[str, jax.Array]:
        return put(synthetic_rows(cursor, case.batch, documents=False), made)

    return Subject(made, batch_at)


CASES = [
    Case(mesh="8x1", zero=3, precision="float64"),
    Case(mesh="pp2 dp2", zero=1, microbatches=2, num_layers=3, precision="float64"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_averages_are_those_of_one_device(case: Case) -> None:
    with jax.enable_x64(True):
        layout, one = subject(case), subject(case.on_one_device())
        result = compare(layout, one, steps=2, bound=1e-9)
        assert result.equal, result
        assert {path.split("/")[0] for path in result.kept} == {EMA}
        state = one.program.init()
        state = state.replace(params=jax.tree.map(lambda x: x * 0.5, state.params))
        evaluated = one.program.evaluated_params(state)
        jax.tree.map(
            lambda mean, p: np.testing.assert_allclose(mean, 2 * p), evaluated, state.params
        )


def test_it_rests_like_the_state_of_the_optimizer() -> None:
    case = Case(mesh="8x1", zero=1, precision="bfloat16")
    made = program(case)
    places = made.shardings
    jax.tree.map(
        lambda mean, master: np.testing.assert_equal(mean.spec, master.spec),
        places.model_state[EMA]["params"],
        places.opt_state["master"],
    )
    assert {leaf.dtype.name for leaf in jax.tree.leaves(made.shapes.model_state)} == {"float32"}
    # The plan and the placement report count it: 4 bytes an entry, in 8 shards.
    plain = make_program(load_config(case.sections()), vocab_size=VOCAB, devices=jax.devices())
    held = [make_report(of) for of in (plain, made)]
    assert held[1].beside == held[1].state - held[0].state
    config = load_config(case.sections(), {"optimizer.ema_decay": 0.9})
    moments = [
        make_workload(some, VOCAB, "cpu").state(layout_of(some, 8)).optimizer
        for some in (load_config(case.sections()), config)
    ]
    assert moments[1] - moments[0] == held[1].beside
