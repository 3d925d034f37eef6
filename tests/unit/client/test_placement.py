"""Which process this is, as torchrun, Slurm and MPI say it."""

import socket

import pytest

from instep.client.join.meeting import meeting_file
from instep.client.join.placement import host_address, placement
from instep.errors import SpecError
from instep.system.addresses import address_towards

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "none",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
MPI = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-77@1",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1, 0, 1)),
        ({"RANK": "1"}, (0, 1, 0, 1)),
        (TORCHRUN, (3, 4, 1, 2)),
        (TORCHRUN | SLURM, (3, 4, 1, 2)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1, 0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, (1, 2, 1, 2)),
        (SLURM | {"SLURM_NTASKS_PER_NODE": "4", "SLURM_NNODES": "2"}, (5, 8, 1, 4)),
        (SLURM | {"SLURM_NNODES": "2"}, (5, 8, 1, 4)),
        (SLURM, (5, 8, 1, 8)),
        (MPI, (0, 2, 0, 2)),
        (BATCH_SCRIPT, (0, 1, 0, 1)),
        (BATCH_SCRIPT | {"SLURM_STEP_ID": "4294967290"}, (0, 1, 0, 1)),
        (BATCH_SCRIPT | MPI | {"OMPI_COMM_WORLD_RANK": "1"}, (1, 2, 0, 2)),
        (SLURM | MPI | {"OMPI_COMM_WORLD_RANK": "1"}, (1, 2, 0, 2)),
    ],
)
def test_a_process_finds_its_place_in_the_environment(environment, expected):
    assert placement(environment)[:4] == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RANK": "three"}, ["RANK='three'", "torchrun gives a number"]),
        ({"WORLD_SIZE": ""}, ["WORLD_SIZE=''"]),
        ({"RANK": "4"}, ["RANK=4 with WORLD_SIZE=4", "below the size"]),
        ({"RANK": "-1"}, ["RANK=-1"]),
        ({"LOCAL_WORLD_SIZE": "x"}, ["LOCAL_WORLD_SIZE='x'"]),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(change, words):
    with pytest.raises(SpecError) as error:
        placement(TORCHRUN | change)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"SLURM_NNODES": "x"}, "SLURM_NNODES='x' in the environment: Slurm gives a number there"),
        ({"SLURM_JOB_NUM_NODES": ""}, "SLURM_JOB_NUM_NODES=''"),
        ({"SLURM_NNODES": "0"}, "SLURM_NNODES=0"),
    ],
)
def test_a_number_of_nodes_that_makes_no_sense_is_refused(change, words):
    with pytest.raises(SpecError, match=words):
        placement(SLURM | change)


def test_processes_of_one_start_share_a_key_and_those_of_the_next_do_not():
    mine = placement(TORCHRUN).key
    assert placement(TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"}).key == mine
    assert placement(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"}).key != mine
    assert placement(TORCHRUN | {"MASTER_PORT": "29501"}).key != mine
    assert placement(SLURM).key != placement(SLURM | {"SLURM_STEP_ID": "1"}).key


def test_processes_that_nothing_tells_from_those_of_another_start_are_refused():
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    with pytest.raises(SpecError, match=r"WORLD_SIZE=4, and nothing .* Set MASTER_PORT to the"):
        placement({name: TORCHRUN[name] for name in names})


def test_a_key_is_fit_for_a_file_name(tmp_path):
    place = placement(TORCHRUN | {"TORCHELASTIC_RUN_ID": "../a b/c"})
    assert meeting_file(tmp_path, place).file.parent == tmp_path


def test_one_host_listens_on_loopback():
    assert host_address(placement({})) == "127.0.0.1"


@pytest.mark.parametrize("name", ["no such name", "localhost"])
def test_a_host_whose_name_leads_nowhere_is_told_what_to_do(monkeypatch, name):
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    with pytest.raises(SpecError, match=rf"name, {name}, leads to .*rendezvous='HOST:PORT'"):
        host_address(placement(TORCHRUN))


def test_loopback_is_reached_from_loopback():
    assert address_towards("127.0.0.1") == "127.0.0.1"
