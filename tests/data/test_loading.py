"""Files that somebody else wrote: no code in them runs unless the caller says so, and what they lack is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from rollwright.cli import main
from rollwright.data import LazyTensorStorage, ListStorage, ReplayBuffer, ReplayBufferEnsemble
from rollwright.data.datasets import DatasetWriter, describe_dataset, load_dataset
from rollwright.data.loading import load_mapped, load_saved
from rollwright.errors import DamagedFileError


class Runs:
    """Writes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return Path.write_text, (self.file, "code was run")


@pytest.fixture
def witness(tmp_path):
    return tmp_path / "witness"


@pytest.fixture
def dataset(tmp_path):
    with DatasetWriter(tmp_path / "dataset", steps=5) as target:
        target.write(TensorDict({"obs": torch.arange(5.0), "next": {"reward": torch.ones(5, 1)}}, [5]))
    return tmp_path / "dataset"


@pytest.fixture
def foreign(tmp_path, witness):
    """A folder of TensorDict.memmap with an entry that is pickled."""
    frames = TensorDict({"obs": torch.arange(5.0), "info": TensorDict({}, [5])}, [5])
    frames["info"].set_non_tensor("note", Runs(witness))
    frames.memmap(str(tmp_path / "foreign"))
    return tmp_path / "foreign"


def test_a_pickle_in_a_mapped_folder_needs_the_callers_word(foreign, witness, capsys):
    with pytest.raises(ValueError, match=r"'info.note' in .*other.pickle. Pass allow_pickle=True"):
        load_mapped(foreign)
    assert main(["inspect", str(foreign)]) == 1
    assert "'info.note'" in (error := capsys.readouterr().err)
    assert "--allow-pickle" in error
    assert not witness.exists()
    assert main(["inspect", str(foreign), "--allow-pickle"]) == 0
    assert witness.exists()


def test_text_and_numbers_in_a_mapped_folder_need_none(tmp_path):
    TensorDict({"obs": torch.arange(5.0)}, [5]).set_non_tensor("note", "hello").memmap(str(tmp_path / "plain"))
    assert load_mapped(tmp_path / "plain")["note"] == "hello"


def test_nothing_that_was_put_into_a_dataset_is_run(dataset, foreign, witness, capsys):
    meta = dataset / "frames" / "meta.json"
    shutil.copytree(foreign / "info", dataset / "frames" / "info")
    listed = json.loads((foreign / "meta.json").read_text())["info"]
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "info": listed}))
    with pytest.raises(DamagedFileError, match=r"frames/info/note/other.pickle is a pickle"):
        load_dataset(dataset)
    assert main(["inspect", str(dataset)]) == 1
    assert "other.pickle" in capsys.readouterr().err
    assert not witness.exists()


def test_entries_that_the_description_does_not_name_are_damage(dataset):
    TensorDict({"more": torch.zeros(5)}, [5]).memmap(str(dataset / "frames" / "extra"))
    meta = dataset / "frames" / "meta.json"
    as_written = json.loads(meta.read_text())
    meta.write_text(json.dumps({**as_written, "extra": as_written["next"]}))
    with pytest.raises(DamagedFileError, match=r"\('extra', 'more'\)"):
        load_dataset(dataset)
    meta.write_text(json.dumps({name: value for name, value in as_written.items() if name != "obs"}))
    with pytest.raises(DamagedFileError, match="different: 'obs'"):
        load_dataset(dataset)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 9}, "'steps'"),
        ({"steps": -1}, "'steps'"),
        ({"steps": None}, "'steps'"),
        ({"allocated_steps": "5"}, "'allocated_steps'"),
        ({"batch_size": [2**40, 4]}, "'batch_size'"),
        ({"batch_size": []}, "'batch_size'"),
        ({"data": "../elsewhere"}, "'data'"),
        ({"entries": None}, "'entries'"),
        ({"entries": [{"key": "obs"}]}, "the entry"),
    ],
)
def test_a_damaged_description_is_named(dataset, change, message):
    file = dataset / "dataset.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(DamagedFileError, match=rf"dataset.json is damaged: .*{message}"):
        load_dataset(dataset)


def test_a_description_that_is_cut_short_is_named(dataset):
    file = dataset / "dataset.json"
    whole = file.read_bytes()
    for length in (0, 1, len(whole) // 2):
        file.write_bytes(whole[:length])
        with pytest.raises(DamagedFileError, match=r"dataset.json is no readable JSON"):
            describe_dataset(dataset)


def test_a_dataset_reads_no_file_outside_of_its_folder(dataset, tmp_path):
    (tmp_path / "secret").write_bytes(bytes(100))
    file = dataset / "dataset.json"
    description = json.loads(file.read_text())
    description["entries"][0]["file"] = "../../secret"
    file.write_text(json.dumps(description))
    with pytest.raises(DamagedFileError, match="lies outside"):
        load_dataset(dataset)


def test_objects_of_a_saved_buffer_need_the_callers_word(tmp_path, witness):
    members = [ReplayBuffer(storage=ListStorage(5)) for _ in range(2)]
    for member in members:
        member.extend([Runs(witness), "text"])
    members[0].dumps(tmp_path / "saved")
    other = ReplayBuffer(storage=ListStorage(5))
    with pytest.raises(ValueError, match=r"elements.pt holds objects of .*pathlib.Path.* Pass allow_pickle=True"):
        other.loads(tmp_path / "saved")
    assert not witness.exists()
    assert len(other) == 0
    other.loads(tmp_path / "saved", allow_pickle=True)
    assert other[1] == "text"
    assert witness.exists()

    ReplayBufferEnsemble(*members).dumps(tmp_path / "both")
    again = ReplayBufferEnsemble(*(ReplayBuffer(storage=ListStorage(5)) for _ in range(2)))
    with pytest.raises(ValueError, match="allow_pickle=True"):
        again.loads(tmp_path / "both")
    again.loads(tmp_path / "both", allow_pickle=True)
    assert again[1, 1] == "text"


def test_tensordicts_of_any_kind_need_no_word(tmp_path):
    ragged = lazy_stack([TensorDict({"a": torch.zeros(n), "b": {"c": torch.ones(2)}}) for n in (1, 2)])
    buffer = ReplayBuffer(storage=ListStorage(5))
    buffer.extend([TensorDict({"a": torch.arange(2), "b": {"c": torch.ones(2, 3)}}, [2]), ragged])
    buffer.dumps(tmp_path / "saved")
    torch.save(buffer.state_dict(), tmp_path / "state.pt")
    twins = [ReplayBuffer(storage=ListStorage(5)) for _ in range(2)]
    twins[0].loads(tmp_path / "saved")
    twins[1].load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for twin in twins:
        assert twin[0]["a"].tolist() == [0, 1]
        assert [one["a"].shape for one in twin[1].unbind(0)] == [(1,), (2,)]


def test_a_saved_file_is_damaged_or_foreign(tmp_path, capsys, witness):
    buffer = ReplayBuffer(storage=LazyTensorStorage(5))
    buffer.extend(TensorDict({"obs": torch.arange(3)}, [3]))
    buffer.dumps(tmp_path / "saved")
    file = tmp_path / "saved" / "state.pt"
    whole = file.read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(DamagedFileError, match=r"state.pt is damaged, or was not written by torch.save"):
            buffer.loads(tmp_path / "saved")
    torch.save({"obs": Runs(witness)}, tmp_path / "frames.pt")
    assert main(["inspect", str(tmp_path / "frames.pt")]) == 1
    assert "--allow-pickle" in capsys.readouterr().err
    with pytest.raises(ValueError, match="allow_pickle=True"):
        load_saved(tmp_path / "frames.pt")
    assert not witness.exists()
