"""Reading the pickles of other programs without running anything that they name.

The idea: a pickle is a small program that may call any function it names. Here every name is answered by something
of ours: what rebuilds a tensor by a note of where the tensor's bytes lie (`StoredTensor`), plain containers by
themselves, and the classes of the packages known to write such files by `Inert` placeholders, which keep what was
stored about an object and do nothing with it. Any other name ends the reading. Nothing is ever imported.

The invariant: no callable that a pickle reaches is defined outside this file, but for containers; and no size that it
claims is believed before it is checked against the file.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modelworks.checkpoint.errors import CheckpointError
from modelworks.checkpoint.formats.stored_tensor import StoredTensor

MAX_PICKLE_BYTES = 1 << 30
_DTYPES = {
    f"{name}Storage": dtype
    for name, dtype in {
        "Double": torch.float64,
        "Float": torch.float32,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
    }.items()
}
_TORCH_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES.values()}
# Packages whose objects such files hold beside tensors. Their names are kept, none of their code is looked up.
_INERT_PACKAGES: tuple[str, ...] = (
    "deepspeed.",
    "megatron.",
    "transformer_engine.",
    "apex.",
    "numpy.",
    "transformers.",
    "accelerate.",
)
_INERT_PACKAGES += ("torch.distributed.checkpoint.", "torch.distributed._shard.", "torch.optim.", "torch.nn.")
_INERT_NAMES = {
    ("argparse", "Namespace"),
    ("signal", "Signals"),
    ("datetime", "timedelta"),
    ("pathlib", "PosixPath"),
    ("types", "SimpleNamespace"),
    ("builtins", "int"),  # what a defaultdict makes its values with
    ("builtins", "float"),
    ("torch", "Tensor"),
    ("torch", "device"),
    ("torch", "Generator"),
}


class Inert:
    """Stands for an object of another package. kind: its class. arguments: what its constructor was given.

    state: what was to be restored into it. items: what it held, if it was a list or a mapping.
    """

    kind = ""
    arguments: tuple[Any, ...]
    state: Any
    items: list[Any]

    def __new__(cls, *arguments: Any, **_: Any) -> Inert:
        self = object.__new__(cls)
        self.arguments = arguments
        self.state = None
        self.items = []
        return self

    def __init__(self, *arguments: Any, **more: Any) -> None:
        """Nothing: what matters was kept on creation."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, value: Any) -> None:
        self.items.append(value)

    def extend(self, values: Any) -> None:
        self.items.extend(values)

    def fields(self) -> dict[str, Any]:
        """The object's attributes by name; empty where they were not stored so."""
        return self.state if isinstance(self.state, dict) else {}


def read_pickle(path: Path) -> Any:
    """The value of a file that is one pickle. Raises CheckpointError for a name that is not to be read."""
    size = path.stat().st_size
    if size > MAX_PICKLE_BYTES:
        raise CheckpointError(f"{path}: {size:,} bytes is more than a file of this kind may have")
    return unpickle(path.read_bytes(), path, None)


def unpickle(text: bytes, path: Path, storages: dict[str, tuple[int, int]] | None) -> Any:
    """The value of a pickle. path: the file that holds it, for messages and for its tensors. storages: key -> first
    byte and end of a storage in the file; None where there can be none."""
    try:
        return _Unpickler(text, path, storages).load()
    except CheckpointError:
        raise
    except Exception as error:
        # Whatever a damaged or hostile program of a pickle provokes: all of it is the file's fault.
        raise CheckpointError(f"{path}: its pickle cannot be read ({type(error).__name__}: {error})") from None


@dataclass(frozen=True)
class _Storage:
    begin: int
    end: int
    dtype: torch.dtype


class _Callable:
    """A function of ours that a pickle may call, and can do nothing else with."""

    __slots__ = ("_function",)
    _function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "_function", function)

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("a function has no state")

    def __setattr__(self, name: str, value: Any) -> None:
        raise pickle.UnpicklingError("a function has no state")


class _Unpickler(pickle.Unpickler):
    def __init__(self, text: bytes, path: Path, storages: dict[str, tuple[int, int]] | None) -> None:
        super().__init__(io.BytesIO(text))
        self._path, self._storages = path, storages
        self._kinds: dict[tuple[str, str], type[Inert]] = {}
        self._known: dict[tuple[str, str], Any] = {
            ("collections", "OrderedDict"): OrderedDict,
            ("collections", "defaultdict"): _Callable(lambda *_: {}),
            ("builtins", "list"): list,
            ("builtins", "dict"): dict,
            ("builtins", "set"): set,
            ("builtins", "frozenset"): frozenset,
            ("builtins", "slice"): slice,
            ("_codecs", "encode"): _Callable(_encode),
            ("torch", "Size"): _Callable(tuple),
            ("torch.serialization", "_get_layout"): _Callable(str),
            ("torch._utils", "_rebuild_tensor"): _Callable(self._tensor),
            ("torch._utils", "_rebuild_tensor_v2"): _Callable(self._tensor),
            ("torch._utils", "_rebuild_tensor_v3"): _Callable(self._typed_tensor),
            ("torch._utils", "_rebuild_parameter"): _Callable(lambda tensor, *_: tensor),
            ("torch._utils", "_rebuild_parameter_with_state"): _Callable(lambda tensor, *_: tensor),
            ("torch._tensor", "_rebuild_from_type_v2"): _Callable(_without_attributes),
            ("torch.storage", "UntypedStorage"): torch.uint8,
        }
        self._known |= {("torch", name): dtype for name, dtype in {**_DTYPES, **_TORCH_DTYPES}.items()}

    def find_class(self, module: str, name: str) -> Any:
        """What stands for `module.name`."""
        module = "builtins" if module == "__builtin__" else module  # as protocol 2 spells it
        if (module, name) in self._known:
            return self._known[module, name]
        if (module, name) in _INERT_NAMES or f"{module}.".startswith(_INERT_PACKAGES):
            if (module, name) not in self._kinds:
                self._kinds[module, name] = type(name, (Inert,), {"kind": f"{module}.{name}"})
            return self._kinds[module, name]
        raise CheckpointError(
            f"{self._path}: its pickle asks for `{module}.{name}`, which no such file needs; refused, and nothing of "
            "it was run"
        )

    def persistent_load(self, identity: Any) -> _Storage:
        """A storage of a torch file: ("storage", type, key, device, number of elements)."""
        if self._storages is None:
            raise CheckpointError(f"{self._path}: holds tensors, but is no file of torch.save")
        word, dtype, key, _, count = identity
        if word != "storage" or not isinstance(dtype, torch.dtype) or type(count) is not int:
            raise CheckpointError(f"{self._path}: holds a storage of an unknown kind ({dtype!r})")
        begin, end = self._storages[key]
        if count * dtype.itemsize != end - begin:
            raise CheckpointError(
                f"{self._path}: storage {key} has {end - begin:,} bytes, expected {count:,} elements of {dtype}"
            )
        return _Storage(begin, end, dtype)

    def _tensor(self, storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> StoredTensor:
        return self._checked(storage, offset, shape, stride, storage.dtype)

    def _typed_tensor(
        self, storage: Any, offset: Any, shape: Any, stride: Any, _gradient: Any, _hooks: Any, dtype: Any, *_: Any
    ) -> StoredTensor:
        return self._checked(storage, offset, shape, stride, dtype)

    def _checked(self, storage: Any, offset: Any, shape: Any, stride: Any, dtype: Any) -> StoredTensor:
        numbers = [offset, *shape, *stride]
        if not isinstance(storage, _Storage) or not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{self._path}: holds a tensor of an unknown kind")
        if len(shape) != len(stride) or not all(type(n) is int and 0 <= n < 2**48 for n in numbers):
            raise CheckpointError(f"{self._path}: holds a tensor of shape {shape!r} and strides {stride!r}")
        last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if math.prod(shape) and (last + 1) * dtype.itemsize > storage.end - storage.begin:
            raise CheckpointError(f"{self._path}: a tensor of shape {tuple(shape)} reaches beyond its storage")
        # A view that repeats its elements (stride 0) is small in the file and without bounds in memory.
        if math.prod(shape) * dtype.itemsize > storage.end - storage.begin:
            raise CheckpointError(f"{self._path}: a tensor of shape {tuple(shape)} is larger than its storage")
        return StoredTensor(self._path, storage.begin, storage.end, dtype, offset, tuple(shape), tuple(stride))


def _without_attributes(rebuild: Any, _kind: Any, arguments: Any, _state: Any) -> Any:
    """A tensor that carried attributes, without them."""
    if not isinstance(rebuild, _Callable):
        raise pickle.UnpicklingError("a tensor that is rebuilt by something else than torch's functions")
    return rebuild(*arguments)


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """How protocol 2 writes bytes."""
    if encoding != "latin1" or not isinstance(text, str):
        raise pickle.UnpicklingError(f"bytes in the encoding {encoding!r}")
    return text.encode("latin1")
