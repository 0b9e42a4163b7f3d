"""How a process finds its peers in what engines set."""

import pytest

from shardtrain.errors import ConfigError
from shardtrain.sharding.processes import Peers, find_peers

SLURM = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}
MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
OURS = {"SHARDTRAIN_COORDINATOR": "a:1", "SHARDTRAIN_PROCESSES": "2", "SHARDTRAIN_PROCESS": "1"}
WHERE = {"SHARDTRAIN_COORDINATOR": "a:1"}


@pytest.mark.parametrize(
    ("environ", "peers"),
    [
        ({}, None),
        (OURS, Peers(1, 2, "a:1")),
        (SLURM, Peers(3, 4, "", "slurm")),
        (MPI, Peers(0, 2, "", "ompi")),
        (SLURM | WHERE, Peers(3, 4, "a:1")),
        (MPI | WHERE, Peers(0, 2, "a:1")),
        (SLURM | OURS, Peers(1, 2, "a:1")),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),
        (SLURM | WHERE | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        ({"SLURM_STEP_NUM_TASKS": "4"}, None),
        ({"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}, None),  # the script of a job
    ],
)
def test_peers(environ: dict[str, str], peers: Peers | None) -> None:
    assert find_peers(environ) == peers


@pytest.mark.parametrize("missing", [*OURS])
def test_named_in_part(missing: str) -> None:
    part = {name: value for name, value in OURS.items() if name != missing}
    with pytest.raises(ConfigError, match="in part or wrongly"):
        find_peers(part)


def test_only_the_coordinator_and_no_engine() -> None:
    with pytest.raises(ConfigError, match="in part or wrongly"):
        find_peers(WHERE)
