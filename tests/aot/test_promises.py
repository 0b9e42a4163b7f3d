"""What each layout promises about communication and memory, read from programs compiled for H100s.

No GPU is needed: the compiler's plug-in is enough (extra `plan`). Every program is the run's own
step. The expected figures are formulas over the shapes of the model, and bytes hold within 1 %.
"""

import dataclasses
import fcntl
import pickle
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from typing import Any

import jax
import numpy as np
import pytest

from shardtrain.config import RunConfig, load_config
from shardtrain.models.flops import matrix_parameters
from shardtrain.plan.audit import audit
from shardtrain.plan.collectives import Collective, collectives
from shardtrain.plan.compiling import Compiled, Job, compile_for
from shardtrain.plan.expected import expect
from shardtrain.plan.hlo import Module, parse_hlo
from shardtrain.plan.targets import Target
from shardtrain.run_program import abstract_batch, lower_step, make_program, make_report
from shardtrain.train.build import Program
from tests.aot.marks import needs_compiler
from tests.aot.sections import model_sections
from tests.rows import shortened

pytestmark = needs_compiler()

TARGET = Target("h100", hosts=1, per_host=8)
LAYERS, EMBED, VOCAB, LENGTH, BATCH = 4, 512, 8192, 256, 64
MIB = 2**20
BASE = model_sections(LAYERS, EMBED, VOCAB, LENGTH, BATCH)
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero0": {},
    "zero0, 4 microbatches": {"train.microbatches": 4},
    "zero1": {"sharding.zero": 1},
    "zero1, 4 microbatches": {"sharding.zero": 1, "train.microbatches": 4},
    "zero2, 4 microbatches": {"sharding.zero": 2, "train.microbatches": 4},
    "zero3": {"sharding.zero": 3},
    "zero3, 2 microbatches": {"sharding.zero": 3, "train.microbatches": 2, "train.remat": "full"},
    "tensor": {"sharding.zero": 1, "mesh.tensor": 2},
    "sequence": {"sharding.zero": 3, "mesh.tensor": 2, "sharding.sequence_parallel": True},
    "hybrid": {"sharding.zero": 2, "mesh.replica": 2, "model.tied": False},
}
SHORT = ("zero0", "zero3, 2 microbatches", "tensor", "sequence")
"""The others are in the marked run."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A layout with its compiled program."""

    config: RunConfig
    compiled: Compiled

    @cached_property
    def module(self) -> Module:
        return parse_hlo(self.compiled.text)

    @cached_property
    def degrees(self) -> dict[str, int]:
        return self.config.mesh.degrees(TARGET.num_devices)

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        return collectives(self.module, self.degrees)

    @cached_property
    def program(self) -> Program:
        """The same step for as many devices of this process: it has the shapes and placements."""
        return make_program(self.config, vocab_size=VOCAB, devices=jax.devices())

    @property
    def microbatches(self) -> int:
        return self.config.train.microbatches

    @cached_property
    def num_parameters(self) -> int:
        """Parameters that a device of one tensor group computes with."""
        shardings = self.program.placement.computed
        shapes = self.program.shapes.params
        sizes = jax.tree.map(lambda a, s: np.prod(s.shard_shape(a.shape)), shapes, shardings)
        return int(sum(jax.tree.leaves(sizes)))

    @cached_property
    def layer_parameters(self) -> int:
        """Those of one layer."""
        layers = self.program.placement.computed["layers"]
        shapes = self.program.shapes.params["layers"]
        sizes = jax.tree.map(lambda a, s: np.prod(s.shard_shape(a.shape)), shapes, layers)
        return int(sum(jax.tree.leaves(sizes))) // LAYERS

    def over(self, kind: str, *axes: str) -> list[Collective]:
        return [c for c in self.collectives if c.kind == kind and c.axes == axes]


def step_bytes(some: Iterable[Collective]) -> int:
    return sum(c.payload * c.times for c in some)


def large(some: Iterable[Collective]) -> list[Collective]:
    return [c for c in some if c.payload > MIB]


def about(expected: float) -> Any:
    return pytest.approx(expected, rel=0.01)


def compile_all(names: Iterable[str]) -> dict[str, Compiled]:
    """Compiles layouts, in two processes."""
    jobs = {name: Job(lower_step, (load_config(BASE, LAYOUTS[name]), VOCAB)) for name in names}
    halves = [dict(list(jobs.items())[start::2]) for start in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        parts = pool.map(lambda half: compile_for(TARGET, half, seconds=900), halves)
        return {name: compiled for part in parts for name, compiled in part.items()}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Callable[[str], Case]:
    """(layout) -> its program. Compiled once, also when several workers run these tests."""
    folder = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        folder = folder.parent

    @cache
    def compiled(*, short: bool) -> dict[str, Compiled]:
        path = folder / f"aot short {short}.pickle"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                names = [name for name in LAYOUTS if (name in SHORT) is short]
                path.write_bytes(pickle.dumps(compile_all(names)))
        made: dict[str, Compiled] = pickle.loads(path.read_bytes())
        return made

    @cache
    def case_of(name: str) -> Case:
        return Case(load_config(BASE, LAYOUTS[name]), compiled(short=name in SHORT)[name])

    return case_of


def rows(*given: tuple[Any, ...]) -> list[Any]:
    """Rows that begin with the name of a layout."""
    return shortened(given, lambda row: row[0] in SHORT)


Cases = Callable[[str], Case]
every_layout = pytest.mark.parametrize("name", shortened(LAYOUTS, SHORT.__contains__))


# -- memory


@every_layout
def test_arguments_are_the_state_and_the_batch(case: Cases, name: str) -> None:
    """To the byte; and the state is donated, all of it."""
    it = case(name)
    state = make_report(it.program).state + 4 + 4 + 8 + 4  # step, cursor, key
    read = {k: a for k, a in abstract_batch(it.config, it.program).items() if k != "sample"}
    batch = sum(
        int(np.prod(a.sharding.shard_shape(a.shape))) * a.dtype.itemsize for a in read.values()
    )
    memory = it.compiled.memory
    assert memory["arguments"] == state + batch
    assert memory["aliased"] == state


@pytest.mark.parametrize(
    ("name", "bytes_each"),
    rows(
        ("zero0", 2 + 12),
        ("zero1", 2 + 12 / 8),
        ("zero2, 4 microbatches", 2 + 12 / 8),
        ("zero3", (2 + 12) / 8),
        ("tensor", 2 + 12 / 4),
        ("hybrid", 2 + 12 / 4),
    ),
)
def test_bytes_of_a_parameter(case: Cases, name: str, bytes_each: float) -> None:
    """Two for bfloat16, twelve for its master and two moments, shared out as the stage says."""
    it = case(name)
    assert it.compiled.memory["aliased"] == about(bytes_each * it.num_parameters)


# -- work


@every_layout
def test_every_layout_does_the_same_work(case: Cases, name: str) -> None:
    """6 FLOPs a parameter and token, and attention's two products with their five backwards.

    Full remat adds a forward of the layers without its last product, which nobody reads.
    """
    it = case(name)
    model = it.config.model
    product = 2 * LAYERS * model.num_heads * model.head_size * LENGTH
    each = 6 * matrix_parameters(model, VOCAB) + 7 * product
    if it.config.train.remat == "full":
        down = LAYERS * model.mlp_size * EMBED
        each += 2 * (matrix_parameters(model, 0) - down) + 2 * product
    assert it.module.flops == about(each * BATCH * LENGTH / TARGET.num_devices)


@every_layout
def test_nothing_is_gathered_for_want_of_a_better_way(case: Cases, name: str) -> None:
    assert case(name).compiled.rematerialized == ()
    assert None not in case(name).module.loops.values()


@every_layout
def test_the_audit_finds_no_promise_broken(case: Cases, name: str) -> None:
    """It has other formulas than these tests, for any layout, and no bound of them is so tight."""
    it = case(name)
    expected = expect(
        it.program,
        model=it.config.model,
        vocab_size=VOCAB,
        length=LENGTH,
        batch_size=BATCH,
        remat=it.config.train.remat,
        domain=TARGET.per_host,
    )
    assert audit(it.compiled, expected).broken == ()


# -- data parallel


@pytest.mark.parametrize(("name", "width"), rows(("zero0", 2), ("zero0, 4 microbatches", 4)))
def test_zero_0_reduces_gradients_once_a_step(case: Cases, name: str, width: int) -> None:
    """In bfloat16 inside the backward; the float32 sums of several microbatches after the last."""
    it = case(name)
    assert {(c.kind, c.axes) for c in it.collectives} == {("all-reduce", ("data",))}
    reduced = it.over("all-reduce", "data")
    assert step_bytes(reduced) == about(width * it.num_parameters)
    in_loops = [c for c in reduced if c.loops]
    if it.microbatches == 1:  # layer by layer, so that the rest of the backward can hide it
        assert step_bytes(in_loops) == about(width * LAYERS * it.layer_parameters)
        assert {c.times for c in in_loops} == {LAYERS}
    else:
        assert in_loops == []


@pytest.mark.parametrize(
    ("name", "width", "reductions"),
    rows(("zero1", 2, 1), ("zero1, 4 microbatches", 4, 1), ("zero2, 4 microbatches", 2, 4)),
)
def test_zero_1_and_2_scatter_gradients_and_gather_parameters(
    case: Cases, name: str, width: int, reductions: int
) -> None:
    """Stage 1 once a step; stage 2 after every microbatch, which is what makes its sums small."""
    it = case(name)
    assert large(it.over("all-reduce", "data")) == []
    scattered = it.over("reduce-scatter", "data")
    assert step_bytes(scattered) == about(width * reductions * it.num_parameters)
    if name == "zero1, 4 microbatches":
        assert [c.loops for c in scattered if c.loops] == []
    gathered = it.over("all-gather", "data")
    assert step_bytes(gathered) == about(2 * it.num_parameters)
    assert [c.loops for c in gathered if c.loops] == []
    assert {c.dtypes for c in large(gathered)} == {("bf16",)}


@pytest.mark.parametrize(
    "name", shortened(["zero3", "zero3, 2 microbatches", "sequence"], SHORT.__contains__)
)
def test_zero_3_gathers_one_layer_at_a_time(case: Cases, name: str) -> None:
    """Forward and backward, inside the loop over layers; nothing is gathered after the update."""
    it = case(name)
    assert large(it.over("all-reduce", "data")) == []
    gathered = it.over("all-gather", "data")
    layer = 2 * it.layer_parameters
    times = LAYERS * it.microbatches
    in_loops = [c for c in gathered if c.times == times]
    loops = {c.loops[-1] for c in in_loops}
    assert len(loops) == 2  # one forward, one backward
    for loop in loops:
        assert sum(c.payload for c in in_loops if c.loops[-1] == loop) == about(layer)
    rest = [c for c in gathered if c not in in_loops]
    outside = 2 * (it.num_parameters - LAYERS * it.layer_parameters)
    assert sum(c.payload for c in rest) == about(outside)
    assert {c.times for c in large(rest)} <= {1, it.microbatches}
    scattered = it.over("reduce-scatter", "data")
    assert step_bytes(scattered) == about(2 * it.microbatches * it.num_parameters)
    assert max(c.payload for c in scattered if c.times == times) <= 1.01 * layer


@pytest.mark.campaign
def test_hybrid_scatters_within_and_reduces_across(case: Cases) -> None:
    """Groups of 4 share the state out; between the 2 copies only shards travel."""
    it = case("hybrid")
    assert large(it.over("all-reduce", "replica", "data")) == []
    assert large(it.over("all-reduce", "data")) == []
    assert step_bytes(it.over("reduce-scatter", "data")) == about(2 * it.num_parameters)
    assert step_bytes(it.over("all-reduce", "replica")) == about(2 * it.num_parameters / 4)
    assert step_bytes(it.over("all-gather", "data")) == about(2 * it.num_parameters)
    moved = {(c.kind, c.axes) for c in large(it.collectives)}
    assert moved == {
        ("reduce-scatter", ("data",)),
        ("all-reduce", ("replica",)),
        ("all-gather", ("data",)),
    }


# -- tensor parallel

ACTIVATION = BATCH // 4 * LENGTH * EMBED * 2
"""Bytes of the residual stream of one data shard of four."""


def by_loop(some: Iterable[Collective]) -> list[list[Collective]]:
    """Grouped by the loop over layers that they are in; each runs once a layer."""
    groups: dict[str, list[Collective]] = {}
    for collective in some:
        if collective.loops:
            assert collective.times == LAYERS
            groups.setdefault(collective.loops[-1], []).append(collective)
    return list(groups.values())


def test_tensor_parallel_reduces_twice_forward_and_twice_backward(case: Cases) -> None:
    """As Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053), and once at either end."""
    it = case("tensor")
    reduced = large(it.over("all-reduce", "tensor"))
    assert {c.payload for c in reduced} == {ACTIVATION}
    assert {c.dtypes for c in reduced} == {("bf16",)}
    assert [len(loop) for loop in by_loop(reduced)] == [2, 2]
    assert sum(c.times for c in reduced) == 4 * LAYERS + 2
    assert large(c for c in it.collectives if "tensor" in c.axes and c not in reduced) == []


def test_sequence_parallel_gathers_and_scatters_instead(case: Cases) -> None:
    """The same bytes on the wire as all-reduces (Korthikanti et al. 2022, arXiv 2205.05198)."""
    it = case("sequence")
    assert large(it.over("all-reduce", "tensor")) == []
    for kind in ("all-gather", "reduce-scatter"):
        moved = large(it.over(kind, "tensor"))
        assert {c.payload for c in moved} == {ACTIVATION}
        assert {c.dtypes for c in moved} == {("bf16",)}
        assert [len(loop) for loop in by_loop(moved)] == [2, 2]
        assert sum(c.times for c in moved) == 4 * LAYERS + 2
    wire = sum(c.wire * c.times for c in it.collectives if c.axes == ("tensor",))
    reduced = case("tensor").collectives
    assert wire == about(sum(c.wire * c.times for c in reduced if c.axes == ("tensor",)))
