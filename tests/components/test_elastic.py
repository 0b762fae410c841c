"""Names from the environment; agreeing on an attempt's name among live workers and what dead ones left."""

from __future__ import annotations

import importlib
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

import ftckpt.torch
from ftckpt.config import Config
from ftckpt.errors import ConfigError, LaunchError
from ftckpt.frameworks import launcher, rendezvous
from ftckpt.frameworks.launcher import is_drawn, job_name, node_name
from ftckpt.memory.launch_record import AgentProcess
from ftckpt.setting_checks import is_name
from tests.support.errors import raises

TORCH = importlib.import_module("torch.distributed.rendezvous")
ORIGINAL = getattr(TORCH, rendezvous._HOOK)


def test_job_name_prefers_what_is_configured() -> None:
    env = {"TORCHELASTIC_RUN_ID": "run7", "SLURM_JOB_ID": "12"}
    assert job_name("mine", env) == "mine"
    assert job_name(None, env) == "run7"
    assert job_name("", env) == "run7"
    named = {**env, "FTCKPT_JOB": "named"}
    assert job_name("mine", named) == "mine"
    assert job_name(None, named) == "named"
    assert job_name(None, {**env, "FTCKPT_JOB": ""}) == "run7"


@pytest.mark.parametrize("run_id", ["none", ""])
def test_job_name_takes_slurm_when_torchrun_has_no_run_id(run_id: str) -> None:
    assert job_name(None, {"TORCHELASTIC_RUN_ID": run_id, "SLURM_JOB_ID": "12"}) == "slurm-12"


def test_job_name_is_default_only_without_a_launcher() -> None:
    assert job_name(None, {"PATH": "/bin"}) == "default"
    for env in ({"TORCHELASTIC_RUN_ID": "none", "RANK": "0"}, {"RANK": "0"}, {"PMI_RANK": "3"}):
        with pytest.raises(ConfigError, match=r"--rdzv-id .*FTCKPT_JOB"):
            job_name(None, env)


STATIC = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets torchrun's agent have these words on its command line, and this environment."""

    def of(*words: str, directory: Path = Path("/home/me"), **env: str) -> None:
        monkeypatch.setattr(launcher, "agent_of", lambda _: AgentProcess(1, ["torchrun", *words], env, directory))

    return of


def test_a_static_rendezvous_names_the_job(
    agent: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for each rank, node and attempt; another one for what else the user trains there."""
    agent("--master-addr", "n1", "train.py")
    monkeypatch.setattr(sys, "argv", ["pretrain gpt.py"])
    name = job_name(None, STATIC)
    monkeypatch.chdir(tmp_path)  # as a script does that has a folder for each attempt's output
    assert name == job_name(None, {**STATIC, "RANK": "5", "GROUP_RANK": "1", "LOCAL_RANK": "1"})
    assert name.startswith("pretrain-gpt-") and is_name(name)
    others = [job_name(None, {**STATIC, "MASTER_PORT": "29501"}), job_name(None, {**STATIC, "MASTER_ADDR": "n2"})]
    monkeypatch.setattr(sys, "argv", ["other.py"])
    others.append(job_name(None, STATIC))
    agent("--master-addr", "n1", "train.py", directory=Path("/elsewhere"))
    others.append(job_name(None, STATIC))
    assert len({name, *others}) == 5
    # What is named stays named.
    assert job_name("mine", STATIC) == "mine" and job_name(None, {**STATIC, "SLURM_JOB_ID": "1"}) == "slurm-1"


DRAWN = "1e3a516a-1471-4c0b-9f7e-0a1b2c3d4e5f"


@pytest.mark.parametrize("words", [["--rdzv-id", "k1"], ["--rdzv_id=k1", "--standalone"]])
def test_an_id_that_torchrun_has_replaced_names_the_job(agent: Callable[..., None], words: list[str]) -> None:
    """On a single node it draws one, whatever it was given."""
    agent(*words, "train.py")
    env = {"TORCHELASTIC_RUN_ID": DRAWN}
    assert job_name(None, env) == "k1" and not is_drawn("k1", env)
    assert job_name(None, {"TORCHELASTIC_RUN_ID": "k2"}) == "k2", "it has not"
    agent("train.py", PET_RDZV_ID="k3")
    assert job_name(None, env) == "k3"


@pytest.mark.parametrize("bad", ["a/b", "a b", "..", ".", "x" * 65, "ü", "a\n", "--"])
def test_bad_names_are_refused_by_name(bad: str) -> None:
    with pytest.raises(ConfigError) as configured:
        job_name(bad, {})
    assert repr(bad) in str(configured.value)
    with pytest.raises(ConfigError, match="rdzv-id"):
        job_name(None, {"TORCHELASTIC_RUN_ID": bad})
    with pytest.raises(ConfigError, match="FTCKPT_JOB"):
        job_name(None, {"FTCKPT_JOB": bad})
    with pytest.raises(ConfigError):
        node_name(None, {"FTCKPT_NODE": bad})


def test_node_name_order_and_independence_of_ranks() -> None:
    env = {"FTCKPT_NODE": "n-a", "SLURMD_NODENAME": "n-b", "GROUP_RANK": "1"}
    assert node_name("n-c", env) == "n-c"
    assert node_name(None, env) == "n-a"
    assert node_name(None, {"SLURMD_NODENAME": "n-b", "GROUP_RANK": "0"}) == "n-b"
    assert node_name(None, {"GROUP_RANK": "0"}) == node_name(None, {}) == socket.gethostname()


def agree_all(store: Store, world_size: int, timeout_secs: float = 20.0) -> set[str]:
    """The names that ``world_size`` workers agree on, rank 0 starting last."""
    with ThreadPoolExecutor(world_size) as pool:
        ranks = [
            pool.submit(rendezvous.agree, store, rank, world_size, timeout_secs)
            for rank in reversed(range(world_size))
        ]
        return {rank.result() for rank in ranks}


def test_agree_gives_one_new_name_to_each_attempt() -> None:
    store = HashStore()
    names = [agree_all(store, world_size) for world_size in (3, 3, 1, 3, 4)]
    assert all(len(name) == 1 for name in names)
    assert len(set.union(*names)) == len(names)


def test_a_follower_alone_gives_up_at_its_deadline() -> None:
    with pytest.raises(LaunchError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
        rendezvous.agree(HashStore(), 1, 2, timeout_secs=0.2)


def forget_isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has not isolated its attempt; the end of the test restores torch."""
    monkeypatch.setattr(TORCH, rendezvous._HOOK, ORIGINAL)
    monkeypatch.setattr(rendezvous, "_isolation", "")


@pytest.fixture
def agent_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[TCPStore]:
    """A store as an agent would share it with the single worker that is this process."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    worker = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.port),
        "RANK": "0",
        "WORLD_SIZE": "1",
    }
    for key, value in worker.items():
        monkeypatch.setenv(key, value)
    forget_isolation(monkeypatch)
    yield server


def opened_store(url: str) -> Store:
    store: Store = next(iter(torch_rendezvous(url)))[0]
    return store


def test_each_attempt_sees_only_its_own_keys(agent_store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for _attempt in range(2):
        assert rendezvous.isolate_attempts(timeout_secs=10)
        store = opened_store("env://")
        assert not store.check(["address"])
        store.set("address", "dead after this attempt")
        tcp = f"tcp://127.0.0.1:{agent_store.port}?rank=0&world_size=1"
        assert opened_store(tcp).check(["address"])
        forget_isolation(monkeypatch)
    assert not agent_store.check(["address"])
    opened_store("env://").set("address", "restored")
    assert agent_store.check(["address"])


def test_a_private_store_is_left_alone(agent_store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    rendezvous.isolate_attempts(timeout_secs=10)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    opened_store("env://").set("mine", "1")  # port and server are the same
    assert agent_store.check(["mine"])


@pytest.mark.parametrize("value", [None, "False"])
def test_nothing_is_done_where_no_store_is_shared(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    if value is not None:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", value)
    monkeypatch.setattr(rendezvous, "_HOOK", "no_such_name")  # an unknown torch does not matter here
    assert "nothing" in rendezvous.isolate_attempts()


@pytest.mark.usefixtures("agent_store")
def test_an_unknown_torch_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_HOOK", "no_such_name")
    with pytest.raises(LaunchError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        rendezvous.isolate_attempts()


@pytest.mark.usefixtures("agent_store")
def test_an_unreachable_store_is_an_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and never listening: refuses connections
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with raises(LaunchError, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
            rendezvous.isolate_attempts(timeout_secs=1)


@pytest.mark.usefixtures("agent_store")
def test_a_process_group_of_torch_s_own_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a restart would read in torchrun's store where dead ones have listened, and use up all restarts."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with raises(LaunchError, "ftckpt.torch.init_process_group(config"):
        ftckpt.torch.attach(torch.nn.Linear(1, 1), None, config=Config(enabled=True))  # type: ignore[arg-type]
