"""State dicts in PyTorch's pickles, found without unpickling.

A pickle is a program; running it with Python's unpickler calls what the file names. Here its instructions are followed
on inert stand-ins: nothing is imported, called or built. The few names and instructions that a flat state dict consists
of are understood; anything else is refused by name.

Formats: Python's `pickletools`, whose opcode table is used; PyTorch's `torch/_utils.py` (how a tensor is rebuilt) and
`torch/serialization.py` (how its storage is referred to).
"""

import math
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from engine.errors import CheckpointError

REBUILD_TENSOR, REBUILD_PARAMETER = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter"
ORDERED_DICT = "collections.OrderedDict"

STORAGES = {
    "torch.DoubleStorage": np.dtype(np.float64),
    "torch.FloatStorage": np.dtype(np.float32),
    "torch.HalfStorage": np.dtype(np.float16),
    "torch.BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "torch.LongStorage": np.dtype(np.int64),
    "torch.IntStorage": np.dtype(np.int32),
    "torch.ShortStorage": np.dtype(np.int16),
    "torch.CharStorage": np.dtype(np.int8),
    "torch.ByteStorage": np.dtype(np.uint8),
    "torch.BoolStorage": np.dtype(np.bool_),
}
"""PyTorch's names of its element types."""

GLOBALS = frozenset({REBUILD_TENSOR, REBUILD_PARAMETER, ORDERED_DICT, *STORAGES})
"""The only names a file may refer to."""

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLE_SIZES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUSH_ARGUMENT = frozenset({"BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"})


@dataclass(frozen=True)
class Storage:
    """A run of elements that tensors are views of."""

    key: str
    """Name of the archive's entry with its bytes."""
    dtype: np.dtype
    num_elements: int

    @property
    def num_bytes(self) -> int:
        """Size of its entry."""
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True)
class TensorView:
    """A tensor: element (i, j, ...) is at `offset + i * strides[0] + j * strides[1] + ...` of its storage."""

    storage: Storage
    offset: int
    """Elements from the storage's start, as the strides count."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """How many it has."""
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie one after the other in the order of its axes."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


def read_state_dict(path: Path, pickle: bytes) -> dict[str, TensorView]:
    """The tensors of a pickled state dict by name; each lies within its storage. `path` is for messages.

    Raises `CheckpointError` where the pickle is truncated, or holds anything but a flat dict of tensors.
    """
    return _Machine(path).run(pickle)


@dataclass(frozen=True)
class _Global:
    name: str


class _Mark:
    pass


class _Machine:
    """The stack machine of the pickle format, on stand-ins."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stack: list[object] = []
        self._memo: dict[int, object] = {}
        self._position = 0
        self._actions: dict[str, Callable[[object], None]] = {
            "PROTO": lambda _: None,
            "FRAME": lambda _: None,
            "MARK": lambda _: self._stack.append(_Mark()),
            "EMPTY_DICT": lambda _: self._stack.append({}),
            "BINPUT": self._memoize,
            "LONG_BINPUT": self._memoize,
            "MEMOIZE": lambda _: self._memoize(len(self._memo)),
            "BINGET": self._recall,
            "LONG_BINGET": self._recall,
            "TUPLE": lambda _: self._stack.append(tuple(self._pop_to_mark())),
            "SETITEM": lambda _: self._set_items(self._pop(2)),
            "SETITEMS": lambda _: self._set_items(self._pop_to_mark()),
            "GLOBAL": lambda name: self._push_global(str(name).replace(" ", ".")),
            "STACK_GLOBAL": lambda _: self._push_global(".".join(str(part) for part in self._pop(2, str))),
            "BINPERSID": self._refer_to_storage,
            "REDUCE": self._reduce,
            "BUILD": self._build,
        }

    def run(self, pickle: bytes) -> dict[str, TensorView]:
        end = 0
        try:
            for opcode, argument, position in pickletools.genops(pickle):
                self._position, end = position or 0, (position or 0) + 1
                self._step(opcode.name, argument)
        # Of truncated or malformed arguments, among them text that is no UTF-8; names with backslashes give warnings,
        # which some programs make errors.
        except (ValueError, OverflowError, DeprecationWarning):
            raise self._refuse("its pickle is truncated or malformed") from None
        if end != len(pickle):
            raise self._refuse(f"its pickle has {len(pickle)} bytes, and ends at {end}")
        return self._result()

    def _step(self, name: str, argument: object) -> None:
        if name in _PUSH_ARGUMENT:
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name in _TUPLE_SIZES:
            self._stack.append(tuple(self._pop(_TUPLE_SIZES[name])))
        elif name in self._actions:
            self._actions[name](argument)
        elif name != "STOP":
            raise self._refuse(f"instruction {name} is none that a state dict of tensors has")

    def _pop(self, count: int, kind: type = object) -> list[object]:
        start = len(self._stack) - count
        if start < 0 or not all(isinstance(value, kind) for value in self._stack[start:]):
            raise self._malformed()
        popped = self._stack[start:]
        del self._stack[start:]
        return popped

    def _pop_to_mark(self) -> list[object]:
        for start in range(len(self._stack) - 1, -1, -1):
            if isinstance(self._stack[start], _Mark):
                popped = self._stack[start + 1 :]
                del self._stack[start:]
                return popped
        raise self._malformed()

    def _peek(self) -> object:
        if not self._stack:
            raise self._malformed()
        return self._stack[-1]

    def _memoize(self, index: object) -> None:
        assert isinstance(index, int)
        self._memo[index] = self._peek()

    def _recall(self, index: object) -> None:
        assert isinstance(index, int)
        if index not in self._memo:
            raise self._malformed()
        self._stack.append(self._memo[index])

    def _set_items(self, items: list[object]) -> None:
        target = self._peek()
        if not isinstance(target, dict) or len(items) % 2:
            raise self._malformed()
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str):
                raise self._refuse(f"a dict has a key of type {type(key).__name__}; expected names of tensors")
            if key in target:
                raise self._refuse(f"{key[:200]!r} stands twice in a dict")
            target[key] = value

    def _push_global(self, name: str) -> None:
        if name not in GLOBALS:
            raise self._refuse(
                f"it refers to {name[:200]!r}; only {', '.join(sorted(GLOBALS))} are accepted. Expected a flat dict of "
                "tensors: torch.save(model.state_dict(), path)"
            )
        self._stack.append(_Global(name))

    def _refer_to_storage(self, _: object) -> None:
        (reference,) = self._pop(1)
        match reference:
            case ("storage", _Global(name), str(key), str(), int(size)) if name in STORAGES and _is_size(size):
                self._stack.append(Storage(key, STORAGES[name], size))
            case _:
                raise self._malformed()

    def _reduce(self, _: object) -> None:
        function, arguments = self._pop(2)
        match function, arguments:
            case _Global(name), () if name == ORDERED_DICT:
                self._stack.append({})
            case _Global(name), (TensorView() as tensor, bool(), hooks) if name == REBUILD_PARAMETER and hooks == {}:
                self._stack.append(tensor)
            case (
                _Global(name),
                (Storage() as storage, offset, tuple(shape), tuple(strides), bool(), hooks, *metadata),
            ) if name == REBUILD_TENSOR and hooks == {} and all(m is None or m == {} for m in metadata):
                self._stack.append(self._view(storage, offset, shape, strides))
            case _:
                raise self._malformed()

    def _view(self, storage: Storage, offset: object, shape: tuple, strides: tuple) -> TensorView:
        numbers = (offset, *shape, *strides)
        if len(shape) != len(strides) or not all(_is_size(number) for number in numbers):
            raise self._refuse(
                f"a tensor of storage {storage.key[:200]!r} has an offset, sizes or strides that are none"
            )
        assert isinstance(offset, int)
        view = TensorView(storage, offset, shape, strides)
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if view.num_elements and last >= storage.num_elements:
            raise self._refuse(
                f"a tensor of shape {list(shape)}, strides {list(strides)} and offset {offset} reaches beyond its "
                f"storage {storage.key[:200]!r} of {storage.num_elements} elements"
            )
        return view

    def _build(self, _: object) -> None:
        # `state_dict()` hangs the versions of its modules on the dict; nothing here depends on them.
        (state,) = self._pop(1)
        if not isinstance(self._peek(), dict) or not isinstance(state, Mapping) or state.keys() != {"_metadata"}:
            raise self._malformed()

    def _result(self) -> dict[str, TensorView]:
        value = self._stack[0] if len(self._stack) == 1 else None
        if not isinstance(value, dict) or not value:
            raise self._refuse("it holds no dict of tensors; expected torch.save(model.state_dict(), path)")
        tensors = {}
        for name, tensor in value.items():
            if not isinstance(tensor, TensorView):
                raise self._refuse(
                    f"{name[:200]!r} is of type {type(tensor).__name__}, no tensor; expected a flat dict of tensors: "
                    "torch.save(model.state_dict(), path)"
                )
            tensors[name] = tensor
        return tensors

    def _malformed(self) -> CheckpointError:
        return self._refuse(f"the instructions of its pickle up to byte {self._position} make no state dict")

    def _refuse(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: not a state dict that can be read: {why}")


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63
