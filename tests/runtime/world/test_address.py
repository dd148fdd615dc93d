"""The rendezvous address of several hosts, by the variables of each launcher."""

import pytest

import unisono
from unisono.errors import BadArgument
from unisono.runtime.world.address import no_secret, nodes, rendezvous_address
from unisono.runtime.world.environment import find_world

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "123",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "rack[2-3]n[08,10]",
    "SLURM_JOB_NODELIST": "login,rack[2-3]n[08,10]",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-77@1",
}
MPICH = {
    "PMI_RANK": "2",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "0",
    "MPI_LOCALNRANKS": "2",
}
OURS = {
    "UNISONO_RANK": "2",
    "UNISONO_WORLD_SIZE": "4",
    "UNISONO_LOCAL_RANK": "0",
    "UNISONO_LOCAL_WORLD_SIZE": "2",
    "UNISONO_JOB": "c0ffee",
}


def place(environ):
    world = find_world(environ)
    assert world.hosts_several
    return rendezvous_address(world, environ)


@pytest.mark.parametrize(
    ("environ", "address", "why"),
    [
        (TORCHRUN, "10.0.0.1:29600", "MASTER_ADDR, +100 from MASTER_PORT"),
        (TORCHRUN | {"MASTER_PORT": "65500"}, "10.0.0.1:65400", "-100"),
        (TORCHRUN | {"MASTER_ADDR": "fd00::1"}, "[fd00::1]:29600", "MASTER_ADDR"),
        (TORCHRUN | {"UNISONO_ADDRESS": "a:7"}, "a:7", "UNISONO_ADDRESS"),
        (SLURM, "rack2n08:21968", "SLURM_STEP_NODELIST, the port by SLURM_JOB_ID"),
        (SLURM | {"SLURM_STEP_ID": "1"}, "rack2n08:21969", "SLURM_JOB_ID"),
        (SLURM | {"SLURM_STEP_NODELIST": ""}, "login:21968", "SLURM_JOB_NODELIST"),
        (
            SLURM | {"SLURM_STEP_RESV_PORTS": "12000-12003"},
            "rack2n08:12000",
            "RESV_PORTS",
        ),
        # srun --mpi=pmi2 sets PMI's variables as well
        (
            SLURM | {"PMI_RANK": "5", "PMI_SIZE": "7", "MPI_LOCALNRANKS": "3"},
            "rack2n08:21968",
            "SLURM_STEP_NODELIST",
        ),
        (OURS | {"UNISONO_ADDRESS": "[fd00::1]:9"}, "[fd00::1]:9", "UNISONO_ADDRESS"),
        (OPENMPI | {"UNISONO_ADDRESS": "a:29400"}, "a:29400", "UNISONO_ADDRESS"),
        (MPICH | {"UNISONO_ADDRESS": "a:29400"}, "a:29400", "UNISONO_ADDRESS"),
    ],
)
def test_address_by_launcher(environ, address, why):
    found = place(environ)
    assert found.address == address
    assert why in found.why


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (OPENMPI, "mpirun -x UNISONO_ADDRESS=<host of rank 0>:29400 -x UNISONO_SECRET"),
        (MPICH, "mpiexec -genv UNISONO_ADDRESS <host of rank 0>:29400"),
        (OURS, "set UNISONO_ADDRESS to its host"),
        # mpirun in a Slurm job: the variables are those of its daemon
        (SLURM | OPENMPI | {"SLURM_PROCID": "0"}, "mpirun -x UNISONO_ADDRESS"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT='http': expected a port"),
        (TORCHRUN | {"MASTER_PORT": "0"}, "MASTER_PORT='0'"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT='70000'"),
        (TORCHRUN | {"MASTER_ADDR": "a b"}, "MASTER_ADDR='a b:29600': expected host"),
        (OURS | {"UNISONO_ADDRESS": "node1"}, "'node1': expected host:port"),
        (OURS | {"UNISONO_ADDRESS": "fd00::1:80"}, r"as in node1:29400 or \[fd00::1\]"),
        (OURS | {"UNISONO_ADDRESS": "a:0"}, "'a:0': expected host:port"),
        (OURS | {"UNISONO_ADDRESS": "a:65536"}, "'a:65536'"),
        (SLURM | {"SLURM_STEP_NODELIST": "n[1"}, "expected hosts, as in node"),
    ],
)
def test_missing_or_invalid_variable_is_named(environ, message):
    with pytest.raises(BadArgument, match=message):
        place(environ)


def test_slurm_step_without_a_node_list_is_refused():
    result = {name: value for name, value in SLURM.items() if "NODELIST" not in name}
    with pytest.raises(
        BadArgument, match="SLURM_STEP_NODELIST is not set; set UNISONO"
    ):
        place(result)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("a,b-2.example", ["a", "b-2.example"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,12],x", ["n08", "n09", "n10", "n12", "x"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
        ("gpu[001]-ib", ["gpu001-ib"]),
    ],
)
def test_slurm_node_lists_are_expanded(text, hosts):
    assert list(nodes(text)) == hosts


@pytest.mark.parametrize(
    "text", ["", "n[", "n]", "n[1-]", "n[3-1]", "n[a]", "n[[1]]", "a,,b", "a b", "n[]"]
)
def test_invalid_node_list_is_refused(text):
    with pytest.raises(BadArgument, match="expected hosts"):
        list(nodes(text))


@pytest.mark.parametrize(
    ("environ", "how"),
    [
        (TORCHRUN, "the same on every host"),
        (SLURM, "srun passes it"),
        (OPENMPI, "mpirun -x UNISONO_SECRET"),
        (MPICH, "mpiexec -genvlist UNISONO_SECRET"),
        (OURS, "unisono run --hosts does this by itself"),
    ],
)
def test_missing_secret_error_has_advice(environ, how):
    text = str(no_secret(find_world(environ)))
    assert "export UNISONO_SECRET=$(unisono secret)" in text
    assert how in text


def test_job_without_a_name_is_named_by_its_address():
    result = MPICH | {"UNISONO_ADDRESS": "a:29400"}
    assert find_world(result).job == "pmi-a:29400"
    one_host = result | {"PMI_SIZE": "3", "MPI_LOCALNRANKS": "3"}
    assert "a:29400" not in find_world(one_host).job
    nameless = {k: v for k, v in OPENMPI.items() if k != "PMIX_NAMESPACE"}
    assert find_world(nameless | {"UNISONO_ADDRESS": "a:1"}).job == "openmpi-a:1"


def test_init_reports_what_is_missing(monkeypatch):
    """Before the rendezvous; the address is one that no host has."""
    monkeypatch.setattr("unisono.transports.secret._KEPT", [])
    for name in ("UNISONO_SECRET", "UNISONO_SECRET_FILE", "UNISONO_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in OPENMPI.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadArgument, match="does not give rank 0's address"):
        unisono.init()
    monkeypatch.setenv("UNISONO_ADDRESS", "192.0.2.77:29400")
    with pytest.raises(
        BadArgument, match=r"export UNISONO_SECRET=\$\(unisono secret\)"
    ):
        unisono.init()
