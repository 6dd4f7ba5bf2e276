"""Reading and writing safetensors files, one tensor at a time.

The idea: the format is eight bytes of header length (little-endian), a JSON header that gives every tensor's dtype,
shape and byte range, then the bytes. Writing it here rather than through the library lets us stream (one tensor in
memory at a time), checksum what is written without reading it back, and fsync.

The invariant: nothing a file claims is believed before it is checked against the file's size, so that a corrupted
header cannot make us allocate memory or read out of bounds. The byte ranges must tile the data exactly.

Format: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelworks.checkpoint.checksums import XXH3
from modelworks.checkpoint.errors import CheckpointError
from modelworks.checkpoint.lazy_tensor import LazyTensor, loaded
from modelworks.checkpoint.local_storage import read_into
from modelworks.checkpoint.storage import Output

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # the same bound as the reference implementation
_CHUNK = 1 << 24  # written at once; whole blocks of checksums
_OTHER_FORMATS = {
    b"PK\x03\x04": "a zip archive (as torch.save writes: pickled code)",
    b"\x80\x02": "a pickle (which can run code)",
    b"\x80\x03": "a pickle (which can run code)",
    b"\x80\x04": "a pickle (which can run code)",
    b"\x80\x05": "a pickle (which can run code)",
    b"GGUF": "a GGUF file",
}


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies. begin, end: bytes counted from the first byte after the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """One file, its header read and checked; tensors are read on request.

    tensors: name -> `TensorInfo`, in the order of the bytes. metadata: the header's `__metadata__`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            prefix = read_prefix(path, path.stat().st_size, file.read)
        self.tensors, self.metadata = parse_prefix(path, path.stat().st_size, prefix)
        self._data_start = len(prefix)

    def read(self, name: str) -> Tensor:
        """The tensor `name`, in memory of its own on the CPU."""
        info = self.tensors[name]
        tensor = torch.empty(info.shape, dtype=info.dtype)
        buffer = memoryview(byte_view(tensor))
        if read_into(self.path, self._data_start + info.begin, buffer) < len(buffer):
            raise CheckpointError(f"{self.path}: ends inside tensor `{name}`; the file is truncated")
        return tensor


@dataclass(frozen=True)
class WrittenFile:
    """What a checkpoint's manifest says of a file. bytes: of the whole file. header: digest of everything before the
    tensors. checksums: name -> the digests of the tensor's blocks, one after the other."""

    bytes: int
    header: str
    checksums: dict[str, str]


def write_safetensors(
    file: Output, tensors: Sequence[tuple[str, Tensor | LazyTensor]], metadata: Mapping[str, str] | None = None
) -> WrittenFile:
    """Write a whole safetensors file to an open file, hashing what is written.

    A lazy tensor is made when its turn comes, so that one is in memory at a time; tensors of an accelerator are copied
    one at a time too. Raises OSError as it comes.
    """
    header, names = _header({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors}, metadata)
    values = dict(tensors)
    checksums: dict[str, str] = {}
    total = file.write(header)
    for name in names:
        value = values[name]
        data = _bytes_of(name, loaded(value), value.dtype, tuple(value.shape))
        digests = []
        for start in range(0, len(data), _CHUNK):
            chunk = data[start : start + _CHUNK]
            digests.append(XXH3.of_blocks(chunk))
            total += file.write(chunk)
        checksums[name] = "".join(digests)
        data = chunk = memoryview(b"")  # else this tensor would be in memory beside the next one
    return WrittenFile(total, XXH3.digest(header), checksums)


class ShardedSafetensors:
    """`model.safetensors`, or the shards that `model.safetensors.index.json` names, as one set of tensors."""

    def __init__(self, directory: Path, stem: str = "model") -> None:
        self.directory = directory
        self._file_of: dict[str, SafetensorsFile] = {}
        index = directory / f"{stem}.safetensors.index.json"
        single = directory / f"{stem}.safetensors"
        if index.is_file():
            self._open_shards(index)
        elif single.is_file():
            file = SafetensorsFile(single)
            self._file_of = dict.fromkeys(file.tensors, file)
        else:
            raise CheckpointError(f"{directory}: has neither {single.name} nor {index.name}")

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def info(self, name: str) -> TensorInfo:
        return self._file_of[name].tensors[name]

    def read(self, name: str) -> Tensor:
        return self._file_of[name].read(name)

    def _open_shards(self, index: Path) -> None:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{index}: expected a `weight_map` from tensor names to file names")
        files: dict[str, SafetensorsFile] = {}
        for name in sorted(set(weight_map.values())):
            if name != Path(name).name or name in ("", ".", ".."):
                raise CheckpointError(f"{index}: names the file {name!r}, which is not inside the directory")
            if not (self.directory / name).is_file():
                raise CheckpointError(f"{self.directory}: lacks {name}, which {index.name} names; fetch it again")
            files[name] = SafetensorsFile(self.directory / name)
        for tensor, file in weight_map.items():
            if tensor not in files[file].tensors:
                raise CheckpointError(f"{files[file].path}: lacks tensor `{tensor}`, which {index.name} places there")
            self._file_of[tensor] = files[file]
        for file_name, opened in files.items():
            for tensor in opened.tensors:
                if weight_map.get(tensor) != file_name:
                    raise CheckpointError(
                        f"{opened.path}: holds tensor `{tensor}`, which {index.name} does not place there"
                    )


def plan_shards(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Split names, in order, into groups of at most `max_bytes` (a larger tensor gets a group of its own)."""
    groups: list[list[str]] = []
    used = 0
    for name, size in sizes.items():
        if not groups or used + size > max_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return groups


def shard_names(stem: str, count: int) -> list[str]:
    """`model.safetensors`, or `model-00001-of-00003.safetensors` and so on."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def read_json(path: Path, max_bytes: int = MAX_HEADER_BYTES) -> dict[str, Any]:
    """A JSON object from a file of bounded size."""
    size = path.stat().st_size
    if size > max_bytes:
        raise CheckpointError(f"{path}: {size:,} bytes is more than a file of this kind may have ({max_bytes:,})")
    return parse_json(path.read_bytes(), path)


def parse_json(text: bytes, where: object) -> dict[str, Any]:
    """A JSON object without repeated keys, or a `CheckpointError` that starts with `where`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a key appears twice")
        return result

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not valid JSON ({error}); the file is corrupted") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected a JSON object")
    return value


def volume_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _header(
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None
) -> tuple[bytes, list[str]]:
    """All bytes before the tensors, and the order in which they follow."""
    if sys.byteorder != "little":
        raise CheckpointError("safetensors files are little-endian; this machine is not")
    header, offset = {}, 0
    # Wide elements first, so that every tensor starts at a multiple of its element size whatever the mixture.
    names = sorted(shapes, key=lambda name: -shapes[name][0].itemsize)
    for name in names:
        dtype, shape = shapes[name]
        if dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{name}: tensors of {dtype} cannot be stored in safetensors")
        size = volume_bytes(shape, dtype)
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(({"__metadata__": dict(metadata)} if metadata else {}) | header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, names


def _bytes_of(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> memoryview:
    if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name}: announced {dtype} {shape}, given {tensor.dtype} {tuple(tensor.shape)}")
    return memoryview(byte_view(tensor.detach().cpu()))


def read_prefix(where: object, size: int, read: Callable[[int], bytes]) -> bytes:
    """All bytes of a file before its tensors. size: of the file; read: its next bytes, beginning with the first."""
    start = read(8)
    length = int.from_bytes(start, "little")
    if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
        looks = next((what for magic, what in _OTHER_FORMATS.items() if start.startswith(magic)), None)
        if looks is not None:
            raise CheckpointError(f"{where}: not a safetensors file but {looks}, which is not read")
        raise CheckpointError(
            f"{where}: not a safetensors file, or truncated: its header claims {length:,} bytes, the file has {size:,}"
        )
    return start + read(length)


def parse_prefix(where: object, size: int, prefix: bytes) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The tensors and the metadata that a file's first bytes describe, checked against its size."""
    header = parse_json(prefix[8:], f"{where}: safetensors header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{where}: safetensors header: `__metadata__` is not text; the file is corrupted")
    return dict(_entries(where, header, size - len(prefix))), metadata


def _entries(where: object, header: dict[str, Any], data_bytes: int) -> Iterator[tuple[str, TensorInfo]]:
    infos: dict[str, TensorInfo] = {}
    for name, entry in header.items():
        problem = _problem(entry)
        if problem:
            raise CheckpointError(f"{where}: tensor `{name}`: {problem}; the header is corrupted")
        infos[name] = TensorInfo(DTYPES[entry["dtype"]], tuple(entry["shape"]), *entry["data_offsets"])
    position = 0
    for name, info in sorted(infos.items(), key=lambda item: (item[1].begin, item[1].end)):
        if info.begin != position:
            raise CheckpointError(
                f"{where}: tensor `{name}` starts at byte {info.begin:,}, expected {position:,}; "
                "the header is corrupted"
            )
        position = info.end
        if position > data_bytes:
            raise CheckpointError(
                f"{where}: tensor `{name}` ends at byte {position:,} of {data_bytes:,}; the file is truncated"
            )
        yield name, info
    if position != data_bytes:
        raise CheckpointError(f"{where}: {data_bytes - position:,} bytes belong to no tensor; the file is corrupted")


def _problem(entry: object) -> str | None:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        return "expected dtype, shape and data_offsets"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        return f"unknown dtype {dtype!r}"
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
            return "shape and data_offsets must be lists of whole numbers"
    if len(shape) > 64 or len(offsets) != 2:
        return "too many dimensions, or not two offsets"
    if offsets[1] - offsets[0] != volume_bytes(shape, DTYPES[dtype]):
        return f"{dtype} of shape {shape} does not fill its byte range {offsets}"
    return None


def byte_view(tensor: Tensor) -> Any:
    """The tensor's bytes as a flat uint8 array, without a copy where it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
