"""The keyed permutation: bijective for every size, 64-bit, another one for every epoch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtrain.data.permutation import keys, permute


@given(size=st.integers(1, 3000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
def test_every_member_occurs_once(size: int, seed: int, epoch: int) -> None:
    members = permute(np.arange(size), size, keys(seed, epoch))
    assert members.dtype == np.int64
    np.testing.assert_array_equal(np.sort(members), np.arange(size))


@given(size=st.integers(2**20, 2**62), data=st.data())
def test_huge_sizes_stay_inside_and_apart(size: int, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=50, unique=True))
    index = np.array(places, np.int64)
    members = permute(index, size, keys(1, 2))
    assert members.min() >= 0
    assert members.max() < size
    assert len(set(members.tolist())) == len(places)
    one_by_one = [int(permute(index[i : i + 1], size, keys(1, 2))[0]) for i in range(len(index))]
    assert one_by_one == members.tolist()


def test_known_values() -> None:
    """The order is part of what a run can be resumed from: it may never change."""
    small = permute(np.arange(8), 1000, keys(0, 0))
    assert small.tolist() == [663, 439, 626, 2, 595, 732, 36, 189]
    large = permute(np.arange(3), 2**40 + 7, keys(5, 9))
    assert large.tolist() == [309374886077, 853386350987, 445649115332]


@pytest.mark.parametrize("size", [97, 4096, 100_000])
def test_it_looks_random(size: int) -> None:
    members = permute(np.arange(size), size, keys(0, 0))
    other = permute(np.arange(size), size, keys(0, 1))
    assert np.mean(members == np.arange(size)) < 0.1
    assert np.mean(members == other) < 0.1
    if size > 1000:
        for left, right in [
            (members[:-1], members[1:]),
            (members, np.arange(size)),
            (members, other),
        ]:
            assert abs(np.corrcoef(left, right)[0, 1]) < 4 / np.sqrt(size)
        halves = (members < size // 2)[: size // 2].mean()
        assert abs(halves - 0.5) < 4 / np.sqrt(size)
