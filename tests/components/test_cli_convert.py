"""``ftckpt convert``: what it prints, what it writes, its exit status."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_convert import Memory, array, model, read_all, wholes

from ftckpt.cli.main import main
from ftckpt.errors import ConvertError
from ftckpt.universal.catalog import Get, Unit
from ftckpt.universal.consolidation import Consolidator
from ftckpt.universal.conversion import Options, convert, prepare, run
from ftckpt.universal.formats import ReadOptions, open_reader, open_writer
from ftckpt.universal.universal_format import UniversalReader, UniversalWriter
from ftckpt.universal.verification import verify
from tests.support.errors import lacks
from tests.support.pool import run_ranks
from tests.support.repository import is_golden

TENSORS = {**model(3), "weight/layers.0.weight": array((8, 5), seed=9), "buffer/bias": array((4,), seed=8)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A universal checkpoint."""
    convert(Memory(TENSORS, wholes(TENSORS)), UniversalWriter(tmp_path / "source", 400), Options())
    return tmp_path / "source"


def ftckpt(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    status = main(["convert", *map(str, words)])
    told = capsys.readouterr()
    return status, told.out, told.err


def test_a_copy_in_other_files_verified(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = ftckpt(capsys, source, tmp_path / "out", "--verify", "--max-file", "1MiB", "--workers", 2)
    assert (status, err) == (0, "")
    assert read_all(tmp_path / "out") == read_all(source)
    assert "verified 8 tensors" in out and "written 1 files" in out


def test_weights_for_everybody(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (source, tmp_path / "out", "--to", "safetensors", "--roles", "weight,buffer", "--verify")
    status, out, _ = ftckpt(capsys, *words)
    assert status == 0 and not lacks(out, "2")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found["layers.0.weight"].tobytes() == read_all(source)["weight/layers.0.weight"]
    assert sorted(found) == ["bias", "layers.0.weight"]
    status, out, _ = ftckpt(capsys, tmp_path / "out", tmp_path / "again", "--verify")
    assert status == 0 and out
    assert set(read_all(tmp_path / "again")) == {"weight/layers.0.weight", "weight/bias"}


def test_a_dry_run_writes_nothing(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(tmp_path.iterdir())
    status, out, _ = ftckpt(capsys, source, tmp_path / "out", "--dry-run", "--max-file", "400B", "--workers", 2)
    assert status == 0 and sorted(tmp_path.iterdir()) == before
    is_golden("convert", out, folder=tmp_path)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["nowhere", "out"], "nowhere"),
        (["empty", "out"], "empty"),
        (["source.partial", "out"], ""),
        (["source", "empty"], "empty"),
        (["source", "."], ""),
        (["source", "out", "--spec", "gpt"], "--spec"),
        (["source", "out", "--iteration", "3"], "--iteration"),
        (["source", "out", "--set", "a=1"], "--set"),
        (["source", "out", "--spec", "gpt", "--set", "a"], "a"),
        (["source", "out", "--spec", "nothing"], "nothing"),
        (
            ["source", "out", "--spec", "llama", "--set", "kv_hads=2"],
            "llama kv_hads",
        ),
        (
            ["source", "out", "--roles", "weights"],
            "exp_avg",
        ),
        (["source", "out", "--roles", ","], "--roles"),
        (["source", "out", "--max-memory", "lots"], "--max-memory lots"),
        (["source", "out", "--max-memory", "100B"], "100 --max-memory"),
        (["source", "out", "--workers", "0"], "--workers 0"),
        (["source", "out", "--to", "nonsense"], "nonsense"),
        (["source", "source", "out"], ""),
        (["source", "out", "--to", "safetensors", "--roles", "exp_avg"], ""),
    ],
)
def test_what_cannot_be_done_is_said(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "source.partial").mkdir()
    there = ("nowhere", "empty", "source", "source.partial", "out")
    status, _, err = ftckpt(capsys, *(tmp_path / word if word in there else word for word in words))
    assert status == 2 and not lacks(err, *text.split()) and "Traceback" not in err
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_verification_finds_whatever_differs(tmp_path: Path) -> None:
    tensors = model(2)
    source = Memory(tensors, wholes(tensors))
    conversion = prepare(source, UniversalWriter(tmp_path / "unused"), Options())
    assert verify(conversion, source, 2) == 4

    def against(changed: dict[str, np.ndarray]) -> str:
        with pytest.raises(ConvertError) as caught:
            verify(conversion, Memory(changed, wholes(changed)), 2)
        return str(caught.value)

    key = "master/layers.1.weight"
    other = tensors[key].copy()
    other[-1, -1] = np.nextafter(other[-1, -1], np.float32(9))
    assert not lacks(against({**tensors, key: other}), str(key))
    assert not lacks(against({**tensors, key: tensors[key].reshape(4, 10)}), str(key), "F32", "4", "10", "8", "5")
    less = dict(tensors)
    del less[key]
    assert not lacks(against(less), "is", str(key))
    assert not lacks(against({**tensors, "weight/more": other}), "is", "weight/more")


def broken_off_after(files: int, monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    write, left = UniversalWriter.write, list(range(files))

    def few(writer: UniversalWriter, unit: Unit, get: Get) -> None:
        if not left:
            raise ConvertError("broken off")
        left.pop()
        write(writer, unit, get)

    with monkeypatch.context() as patch:
        patch.setattr(UniversalWriter, "write", few)
        assert main(["convert", *map(str, words), "--max-file", "100B", "--workers", "1"]) == 2


def changed_universal(path: Path) -> None:
    shutil.rmtree(path)
    changed = {key: value + 1 for key, value in TENSORS.items()}
    convert(Memory(changed, wholes(changed)), UniversalWriter(path, 400), Options())


def changed_weights(path: Path) -> None:
    file = sorted(path.glob("*.safetensors"))[-1]
    data = bytearray(file.read_bytes())
    data[-4:] = b"\0\0\0\0"
    file.write_bytes(data)


@pytest.mark.parametrize("to", ["universal", "safetensors"])
def test_two_inputs_are_never_mixed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], to: str
) -> None:
    """The source was replaced by one of the same names and shapes since the conversion was broken off."""
    roles = ("--roles", "weight,buffer") if to == "safetensors" else ()
    assert ftckpt(capsys, source, tmp_path / "one", "--to", to, *roles)[0] == 0
    words = (tmp_path / "one", tmp_path / "out")
    broken_off_after(1, monkeypatch, *words)
    (changed_universal if to == "universal" else changed_weights)(tmp_path / "one")
    status, _, err = ftckpt(capsys, *words, "--max-file", "100B")
    assert status == 2 and err and err


def saved_by_megatron(rank: int, world_size: int, argv: list[str], path: str) -> None:
    """Train, and save as Megatron does, in the form that loads in any layout."""
    import train_gpt
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.utils import unwrap_model

    from tests.support import jobs

    job = train_gpt.build(train_gpt.parse_args([*jobs.TINY, *argv, "--iterations", "9"]))
    for _ in range(2):
        train_gpt.train_step(job)
    content = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
    metadata = {**content, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = {"model": unwrap_model(job.model[0]).sharded_state_dict(metadata=metadata)}
    state["optimizer"] = job.optimizer.sharded_state_dict(state, metadata=metadata)
    state |= {"opt_param_scheduler": job.scheduler.state_dict(), "iteration": 2, "checkpoint_version": 3.0}
    dist_checkpointing.save(state, path, content_metadata=content)


@pytest.mark.slow
@pytest.mark.multiproc
def test_between_all_formats_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Megatron's own checkpoint through every format that holds optimizer state: the same bits at the end. And an
    interrupted conversion is resumed by another writer, whatever the format."""
    (tmp_path / "save").mkdir()
    run_ranks(saved_by_megatron, 2, ["--tp", "2", "--untie"], str(tmp_path / "save"))
    steps = [
        ("save", "first", "universal"),
        ("first", "dist", "megatron-dist"),
        ("dist", "second", "universal"),
        ("second", "ds", "deepspeed-universal"),
        ("ds", "third", "universal"),
        ("save", "weights", "safetensors"),
    ]
    for source, out, to in steps:
        words = (tmp_path / source, tmp_path / out, "--to", to, "--verify", "--max-file", "64KiB")
        status, told, err = ftckpt(capsys, *words)
        assert status == 0, f"{source} to {out}: {err}"
        assert "verified" in told
    first, second, third = (read_all(tmp_path / name) for name in ("first", "second", "third"))
    assert len(first) > 60 and first == second == third
    for name, to in (("dist", "megatron-dist"), ("ds", "deepspeed-universal")):
        broken_off_again_and_again(tmp_path / "first", tmp_path / "again" / name, to)
        assert tensors_of(tmp_path / "again" / name) == tensors_of(tmp_path / name)


class Enough(Exception):
    pass


def broken_off_again_and_again(source: Path, out: Path, to: str) -> None:
    """Convert, each time with an error after a third of the files."""
    out.parent.mkdir(exist_ok=True)
    for resumed in range(10):
        writer = open_writer(out, to, 64 << 10)
        conversion = prepare(UniversalReader(source), writer, Options(workers=1))
        each = -(-len(conversion.units) // 3)
        real, left = writer.write, [each]

        def write(unit: Unit, get: Get, real: Callable[..., None] = real, left: list[int] = left) -> None:
            if not left[0]:
                raise Enough
            left[0] -= 1
            real(unit, get)

        writer.write = write  # type: ignore[method-assign]
        try:
            report = run(conversion, Options(workers=1))
        except Enough:
            assert not out.exists()
        else:
            assert (report.resumed, resumed) == (2 * each, 2)
            return


def tensors_of(path: Path) -> dict[str, bytes]:
    source = open_reader([path], ReadOptions())
    found = {}
    filler = Consolidator(source)
    for tensor in filler.tensors:
        found[tensor.key] = filler.get(tensor, 0, tensor.rows).tobytes()
    source.close()
    return found
