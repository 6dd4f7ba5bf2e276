"""Pickles of strangers: tensors come out as torch reads them, and nothing that a pickle names is ever run."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import random
import sys
import types
import zipfile
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelworks.checkpoint import CheckpointError
from modelworks.checkpoint.formats.restricted_pickle import Inert, read_pickle
from modelworks.checkpoint.formats.stored_tensor import StoredTensor
from modelworks.checkpoint.formats.torch_distributed import open_distributed
from modelworks.checkpoint.formats.torch_files import read_torch_file


class Calls:
    """Pickles as a call of a function with arguments."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.function, self.arguments


def attacks(marker: Path) -> dict[str, tuple[Any, str]]:
    import importlib
    import subprocess

    touch = f"touch {marker}"
    program = f"open({str(marker)!r}, 'w')"
    return {
        "os.system": (Calls(os.system, touch), f"{os.system.__module__}.system"),
        "eval": (Calls(eval, program), "eval"),
        "exec": (Calls(exec, program), "exec"),
        "getattr": (Calls(getattr, 1, "real"), "getattr"),
        "import": (Calls(importlib.import_module, "this"), "importlib.import_module"),
        "open": (Calls(open, str(marker), "w"), "io.open"),
        "process": (Calls(subprocess.Popen, ["touch", str(marker)]), "subprocess.Popen"),
        "torch.load": (Calls(torch.load, str(marker)), "torch.serialization.load"),
        "nested": (Calls(torch.storage._load_from_bytes, b"x"), "torch.storage._load_from_bytes"),
        "loads": (Calls(pickle.loads, pickle.dumps(Calls(os.system, touch))), "_pickle.loads"),
        "inside": ({"module": OrderedDict(a=[Calls(os.system, touch)])}, "system"),
    }


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("name", attacks(Path("x")))
def test_attacks_are_refused_by_name(name: str, protocol: int, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    value, named = attacks(marker)[name]
    plain, zipped = tmp_path / ".metadata", tmp_path / "model.pt"
    plain.write_bytes(pickle.dumps(value, protocol=protocol))
    torch.save(value, zipped, pickle_protocol=max(protocol, 2))
    for read, path in ((read_pickle, plain), (read_torch_file, zipped)):
        with pytest.raises(CheckpointError) as caught:
            read(path)
        assert str(path) in str(caught.value)
        # old protocols spell some modules as Python 2 did
        assert f"{named.rpartition('.')[2]}`" in str(caught.value)
        assert f"{named}`" in str(caught.value) or protocol < 4
        assert "refused" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not marker.exists()


@pytest.mark.parametrize(
    "program",
    [
        # a state for one of our own functions, as a mapping and as attributes
        b"\x80\x02ctorch._utils\n_rebuild_parameter\n}X\x01\x00\x00\x00aK\x01sb.",
        b"\x80\x02ctorch._utils\n_rebuild_parameter\nN}X\x0c\x00\x00\x00__defaults__K\x01s\x86b.",
        b"\x80\x02ctorch\nSize\nN}X\t\x00\x00\x00_functionK\x01s\x86b.",
        # a dotted name below an allowed one
        b"\x80\x04\x8c\x0bcollections\x8c\x1cOrderedDict.__init__.__globals__\x93.",
        # the extension registry, a name that is no text, a stack that is empty, no end
        b"\x80\x02\x82\x01.",
        b"\x80\x04K\x01K\x02\x93.",
        b"0.",
        b"\x80\x02]",
        b"",
    ],
)
def test_hand_made_programs_are_refused(program: bytes, tmp_path: Path) -> None:
    path = tmp_path / ".metadata"
    path.write_bytes(program)
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        read_pickle(path)
    # and what is read later is not affected
    torch.save(torch.nn.Parameter(torch.ones(2)), tmp_path / "after.pt")
    assert read_torch_file(tmp_path / "after.pt").read().tolist() == [1, 1]


@pytest.mark.parametrize("protocol", [2, 4])
def test_plain_values_come_through(protocol: int, tmp_path: Path) -> None:
    value = {
        "numbers": [1, 2.5, True, None, -(2**70)],
        "text": ("ä", b"\x00\xff"),
        "ordered": OrderedDict(b=1, a={2, 3}),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "arguments": argparse.Namespace(num_layers=2),
        "grown": defaultdict(list, a=[1]),
    }
    torch.save(value, tmp_path / "a.pt", pickle_protocol=protocol)
    found = read_torch_file(tmp_path / "a.pt")
    assert found["numbers"] == value["numbers"]
    assert found["text"] == value["text"]
    assert list(found["ordered"].items()) == [("b", 1), ("a", {2, 3})]
    assert found["size"] == (2, 3)
    assert found["dtype"] == torch.bfloat16
    assert found["arguments"].fields() == {"num_layers": 2}
    assert found["grown"] == {"a": [1]}


def test_objects_of_their_packages_are_inert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    module = types.ModuleType("megatron.made_up")

    class Loud:
        def __init__(self) -> None:
            self.value = 3

        def __setstate__(self, state: Any) -> None:
            ran.append(state)

    Loud.__module__, Loud.__qualname__ = module.__name__, "Loud"
    module.Loud = Loud  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron", types.ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    torch.save({"a": Loud()}, tmp_path / "a.pt")
    found = read_torch_file(tmp_path / "a.pt")["a"]
    assert isinstance(found, Inert)
    assert found.kind == "megatron.made_up.Loud"
    assert found.fields() == {"value": 3}
    assert ran == []


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8]),
    view=st.sampled_from(["whole", "transposed", "part", "parameter"]),
    seed=st.integers(0, 99),
)
def test_tensors_are_those_that_torch_reads(shape: list[int], dtype: torch.dtype, view: str, seed: int) -> None:
    import tempfile

    generator = torch.Generator().manual_seed(seed)
    tensor: torch.Tensor = torch.randint(0, 2, shape, generator=generator).to(dtype)
    if view == "transposed":
        tensor = tensor.T if tensor.ndim == 2 else tensor
    elif view == "part":
        tensor = tensor[1:] if tensor.ndim and tensor.shape[0] else tensor
    elif view == "parameter" and dtype.is_floating_point:
        tensor = torch.nn.Parameter(tensor)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "a.pt"
        torch.save({"a": tensor, "b": [tensor]}, path)
        found = read_torch_file(path)
        stored = found["a"]
        assert isinstance(stored, StoredTensor)
        assert stored.shape == tuple(tensor.shape)
        assert torch.equal(stored.read(), tensor.detach())
        assert torch.equal(found["b"][0].read(), tensor.detach())
        if tensor.is_contiguous() and tensor.numel():
            middle = tensor.numel() // 2
            assert torch.equal(stored.flat(middle, tensor.numel() - middle), tensor.detach().flatten()[middle:])


def test_a_part_of_a_larger_file(tmp_path: Path) -> None:
    first, second = io.BytesIO(), io.BytesIO()
    torch.save(torch.arange(5), first)
    torch.save(torch.arange(7), second)
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(first.getvalue() + second.getvalue())
    begin = len(first.getvalue())
    assert read_torch_file(path, begin, len(second.getvalue())).read().tolist() == list(range(7))
    assert read_torch_file(path, 0, begin).read().tolist() == list(range(5))
    with pytest.raises(CheckpointError, match="truncated"):
        read_torch_file(path, begin, len(second.getvalue()) + 1)


def test_damaged_and_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"a": torch.arange(1000.0)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=r"a\.pt: not a file that torch\.save"):
        read_torch_file(path)
    torch.save(torch.arange(3), path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"a\.pt: not a file that torch\.save"):
        read_torch_file(path)
    with zipfile.ZipFile(io.BytesIO(whole)) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    with pytest.raises(CheckpointError, match="compressed tensors"):
        read_torch_file(path)


def test_sizes_are_not_believed(tmp_path: Path) -> None:
    """Tensors that claim more than their storage holds, and views that would grow without bounds."""
    path = tmp_path / "a.pt"
    torch.save(torch.ones(1).expand(2**40), path)
    with pytest.raises(CheckpointError, match="larger than its storage"):
        read_torch_file(path)
    torch.save(torch.arange(8.0), path)
    with zipfile.ZipFile(path) as source:
        contents = {name: source.read(name) for name in source.namelist()}
    name = next(name for name in contents if name.endswith("data/0"))
    contents[name] = contents[name][:-4]
    with zipfile.ZipFile(path, "w") as target:
        for member, data in contents.items():
            target.writestr(member, data)
    with pytest.raises(CheckpointError, match="storage 0 has 28 bytes, expected 8 elements"):
        read_torch_file(path)


FIXTURES = Path(__file__).parent / "fixtures"


def test_changed_bytes_end_in_an_error_or_a_value(tmp_path: Path) -> None:
    """Metadata that a real package wrote, with bytes changed, cut and doubled: no other error than ours comes out."""
    text = (FIXTURES / "megatron-llama" / "iter_0000003" / ".metadata").read_bytes()
    draw = random.Random(0)
    refused = []
    for _ in range(400):
        changed = bytearray(text)
        for _ in range(draw.randint(1, 4)):
            place = draw.randrange(len(changed))
            kind = draw.randrange(3)
            if kind == 0:
                changed[place] = draw.randrange(256)
            elif kind == 1:
                del changed[place : place + draw.randint(1, 20)]
            else:
                changed[place:place] = changed[place : place + draw.randint(1, 20)]
        (tmp_path / ".metadata").write_bytes(changed)
        try:
            open_distributed(tmp_path)
        except CheckpointError as error:
            refused.append(str(error))
    assert len(refused) > 200
    assert all(len(message.splitlines()) == 1 for message in refused)
