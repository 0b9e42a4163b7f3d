"""Layers over stages, written or spread by cost."""

import itertools
import re

import numpy as np
import pytest

from shardtrain.errors import ConfigError
from shardtrain.strategies.schedules.layout import Layout, balance, read_layout


def test_o19_no_part_is_empty_and_none_much_larger() -> None:
    """FIELD_FAULTS O-19: 5 equal layers in 4 parts gave 2, 2, 1, 0, and the empty part crashed."""
    for layers in range(1, 41):
        for parts in range(1, layers + 1):
            found = balance(layers, parts).layers
            assert (len(found), sum(found)) == (parts, layers)
            assert min(found) >= 1
            assert max(found) - min(found) <= 1
    assert balance(5, 4).layers == (1, 1, 1, 2)


@pytest.mark.parametrize(("layers", "stages", "virtual"), [(3, 4, 1), (7, 4, 2), (0, 1, 1)])
def test_o19_fewer_layers_than_parts_are_refused(layers: int, stages: int, virtual: int) -> None:
    with pytest.raises(ConfigError, match="one would be empty") as fault:
        balance(layers, stages, virtual)
    assert f"at least {stages * virtual} layers" in str(fault.value)


def test_the_costliest_part_is_as_cheap_as_can_be() -> None:
    for layers, parts in itertools.product(range(2, 9), range(2, 5)):
        cuts = np.array(
            [cut for cut in itertools.product(range(1, layers), repeat=parts) if sum(cut) == layers]
        )
        for embedding, head in itertools.product((0.0, 0.3, 1.0, 2.5), repeat=2):
            if layers >= parts:
                found = balance(layers, parts, embedding=embedding, head=head)
                extra = np.array([embedding] + [0.0] * (parts - 2) + [head])
                assert found.share(embedding, head).max() == (cuts + extra).max(axis=1).min()


@pytest.mark.smoke312
def test_embedding_and_head_take_layers_from_their_stages() -> None:
    assert str(balance(16, 4)) == "E4,4,4,4H"
    assert str(balance(16, 4, head=1.5)) == "E4,4,5,3H"
    assert str(balance(16, 4, embedding=1.0, head=2.0)) == "E3,5,5,3H"


@pytest.mark.parametrize(
    ("text", "stages", "virtual", "layers"),
    [
        ("E,4,4,4,3H", 5, 1, (0, 4, 4, 4, 3)),
        ("4,4,4,3", 4, 1, (4, 4, 4, 3)),
        (" E3, 4*2 ,3H ", 4, 1, (3, 4, 4, 3)),
        ("E1,2,3,4,5,H", 3, 2, (1, 2, 3, 4, 5, 0)),
        ("E6H", 1, 1, (6,)),
    ],
)
def test_a_layout_is_read(text: str, stages: int, virtual: int, layers: tuple[int, ...]) -> None:
    found = read_layout(text, stages, virtual)
    assert found == Layout(stages, virtual, layers)
    assert read_layout(str(found), stages, virtual) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("E4,0,4,4H", "part 1 is empty"),
        ("E4,,4,4H", "part 1 is empty"),
        ("", "part 0 is empty"),
        ("E4,4,4H", "has 3 parts, but there are 4 stages"),
        ("E4,4*3,4H", "has 5 parts"),
        ("4,E4,4,4H", '"E4" is misplaced'),
        ("E4,4H,4,4", '"4H" is misplaced'),
        ("E4*2,4,4H", '"E4*2" is misplaced'),
        ("E4,4,4*0,4H", 'cannot read "4*0"'),
        ("E4,4,-4,4H", 'cannot read "-4"'),
        ("E4,4,4,4h", 'cannot read "4h"'),
        ("E4;4;4;4H", 'cannot read "E4;4;4;4H"'),
        ("E4,4,4,4H", "has 16 layers, but the model has 15\n"),
    ],
)
def test_a_faulty_layout_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as fault:
        read_layout(text, 4, num_layers=15)
    assert str(fault.value).startswith(f'layout="{text}": ')


def test_virtual_stages_are_counted() -> None:
    with pytest.raises(ConfigError, match="has 4 parts, but there are 4 stages x 2 virtual stages"):
        read_layout("4,4,4,4", 4, 2)


def test_rows_say_where_each_layer_lies() -> None:
    layout = read_layout("E,2,1,3,1,H", stages=3, virtual_stages=2)
    assert layout.num_slots == 3
    assert layout.rows().tolist() == [
        [[-1, -1, -1], [3, 4, 5]],
        [[0, 1, -1], [6, -1, -1]],
        [[2, -1, -1], [-1, -1, -1]],
    ]
    rows = balance(11, 2, 2).rows()
    assert np.sort(rows[rows >= 0]).tolist() == list(range(11))


def test_share_is_by_stage_and_virtual_stage() -> None:
    share = read_layout("E,2,1,3,1,H", stages=3, virtual_stages=2).share(0.5, 2.0)
    assert share.tolist() == [[0.5, 3.0], [2.0, 1.0], [1.0, 2.0]]
