"""Plans of sequences that devices share: bytes, FLOPs, traffic, search, cures."""

import math
from typing import Any

import pytest

from shardtrain.commands_plan import make_plan as plan_of
from shardtrain.commands_plan import other_layout
from shardtrain.config import load_config
from shardtrain.plan.cost import cost
from shardtrain.plan.cures import cures
from shardtrain.plan.expected import expect
from shardtrain.plan.hardware import parse_cluster
from shardtrain.plan.memory import memory
from shardtrain.plan.search import search
from shardtrain.plan.traffic import traffic
from shardtrain.plan.workload import Layout, Workload
from shardtrain.run_program import make_program
from shardtrain.run_workload import layout_of, make_workload
from shardtrain.sharding.mesh import abstract_mesh

LAYERS, EMBED, HEADS, VOCAB, LENGTH, BATCH = 4, 256, 8, 1024, 8192, 8
BASE: dict[str, Any] = {
    "run": {"steps": 10},
    "model": {"num_layers": LAYERS, "embed_dim": EMBED, "num_heads": HEADS, "vocab_size": VOCAB},
    "data": {"sequence_length": LENGTH, "batch_size": BATCH},
    "optimizer": {"learning_rate": 1e-3},
    "train": {"precision": "bfloat16", "remat": "full"},
}


def work(**changes: Any) -> Workload:
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return make_workload(load_config(BASE, dotted), VOCAB, "gpu")


@pytest.mark.parametrize("way", ["ring", "ulysses"])
def test_what_a_device_has_of_a_sequence(way: str) -> None:
    workload = work(model__attention=way)
    two, eight = (workload.pieces(Layout(context=n, remat="full")) for n in (2, 8))
    assert two.activation == 4 * eight.activation == 2 * LENGTH // 2 * EMBED
    assert two.logits == 4 * eight.logits == 4 * LENGTH // 2 * VOCAB
    assert two.layer.kept == pytest.approx(4 * eight.layer.kept, rel=0.02)
    assert eight.layer.forward.peak < 0.75 * two.layer.forward.peak  # a tile is of one size


def test_flops_are_shared_out() -> None:
    """Of all pairs the half that causality leaves, and the rest of the tiles on the diagonal."""
    workload = work(model__attention="ring")
    forward = workload.pieces(Layout(context=4)).layer.forward.flops
    matrices = 2 * (4 + 8) * EMBED**2 * LENGTH / 4
    scores = 4 * EMBED * LENGTH / 4 * (LENGTH + 512) / 2
    assert forward == pytest.approx(matrices + scores)
    cluster, alone = parse_cluster("h100:1x8"), Layout(data=8)
    shared = cost(workload, Layout(context=8), cluster)
    assert shared.model_flops == pytest.approx(cost(workload, alone, cluster).model_flops, rel=0.05)
    assert shared.low.context < shared.high.context


def test_the_loss_in_chunks_has_smaller_scores() -> None:
    whole, chunked = work(), work(task__loss_chunks=8)
    layout = Layout(data=8)
    assert whole.pieces(layout).logits == 8 * chunked.pieces(layout).logits
    assert chunked.pieces(layout).head.peak < 0.3 * whole.pieces(layout).head.peak
    # the scores once more: four products for three
    ratio = chunked.pieces(layout).head.flops / whole.pieces(layout).head.flops
    assert ratio == pytest.approx(4 / 3, rel=1e-3)


def test_gradients_are_those_of_all_who_have_positions() -> None:
    sent = traffic(work(data__separate_documents=False), Layout(data=2, context=4, zero=1))
    over = {(s.kind, s.axes) for s in sent}
    assert over == {
        ("reduce-scatter", ("data", "context")),
        ("all-gather", ("data", "context")),
        ("collective-permute", ("context",)),
    }


def test_what_a_ring_sends() -> None:
    """Keys and values n - 1 times forward and backward; their gradients likewise, and home."""
    workload = work(data__separate_documents=False)
    (layout, entries) = Layout(context=8), BATCH * LENGTH / 8 * EMBED
    sent = [s for s in traffic(workload, layout) if s.kind == "collective-permute"]
    total = sum(s.payload * s.times for s in sent)
    each = 2 * 7 * 2 * 2 + 2 * 7 * 4 + 2 * 2
    assert total == LAYERS * each * entries


@pytest.mark.parametrize(
    ("changes", "attention", "head"),
    [({"model.attention": "ring"}, (LENGTH + 512) / 2, 3), ({"task.loss_chunks": 4}, LENGTH, 4)],
)
def test_products_that_the_program_should_have(
    changes: dict[str, Any], attention: float, head: int
) -> None:
    shared = "model.attention" in changes
    degrees = {"mesh.data": 1, "mesh.context": 4} if shared else {"mesh.data": 4}
    config = load_config(BASE, {**changes, **degrees, "train.remat": "none"})
    mesh = abstract_mesh(config.mesh.model_dump(), "gpu")
    found = expect(
        make_program(config, vocab_size=VOCAB, mesh=mesh),
        model=config.model,
        vocab_size=VOCAB,
        length=LENGTH,
        batch_size=BATCH,
        remat="none",
        domain=8,
        loss_chunks=config.task.loss_chunks,
    )
    tokens = BATCH * LENGTH / 4
    layer = 6 * 12 * EMBED**2 + 7 * 2 * EMBED * attention
    assert found.products.model == pytest.approx(
        tokens * (LAYERS * layer + head * 2 * VOCAB * EMBED)
    )


def test_a_search_shares_sequences_if_the_config_does() -> None:
    """Of one sequence a step, four devices can only share the sequence, or the model."""
    changes = {"data.batch_size": 1, "mesh.context": 4, "data.sequence_length": 65536}
    config = load_config(BASE, changes)
    workload = make_workload(config, VOCAB, "gpu")
    cluster, own = parse_cluster("h100:1x4"), layout_of(config, 4)
    assert own.context == 4
    found = search(workload, cluster, own=own, keep=40).best
    assert own in [candidate.layout for candidate in found]
    assert found[0].layout.context > 1
    assert all(math.prod(c.layout.degrees.values()) == 4 for c in found)
    others = search(workload, cluster, keep=40)
    assert {c.layout.context for c in others.best} <= {1}


def test_a_cure_for_a_long_window() -> None:
    """Whole sequences do not fit; sharing them, one after another, makes it fit."""
    sizes = {"model.num_layers": 16, "model.embed_dim": 2048, "data.sequence_length": 262144}
    changes = {**sizes, "mesh.data": 8, "model.attention": "ring"}
    workload = make_workload(load_config(BASE, changes), VOCAB, "gpu")
    layout = Layout(data=8, zero=3, remat="full")
    assert memory(workload, layout).total > 24 * 2**30
    found = cures(workload, layout, parse_cluster("rtx4090:1x8"))
    assert any(candidate.layout.context > 1 for candidate in found)


def test_another_layout_leaves_room_for_context() -> None:
    plan = plan_of(load_config(BASE, {"mesh.data": 8}), "h100:1x8", search=False)
    assert other_layout(plan, "context=4").degrees["data"] == 2
