"""Arrays in pickle files, found without unpickling.

A pickle is a program; running it with Python's unpickler calls what the file names. Here its instructions are followed
on inert stand-ins: nothing is imported, called or built, and the arrays' bytes are not read at all, only located. The
few names and instructions that a pickled numpy array, or Grok-1's `QuantizedWeight8bit`, consists of are understood;
anything else is refused by name.

Format: Python's `pickletools`, whose opcode table is used.
"""

import math
import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np

from engine.errors import CheckpointError

RECONSTRUCT, NDARRAY, DTYPE = "numpy.core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype"
BFLOAT16, QUANTIZED = "ml_dtypes.bfloat16", "__main__.QuantizedWeight8bit"
GLOBALS = frozenset({RECONSTRUCT, NDARRAY, DTYPE, BFLOAT16, QUANTIZED})
"""The only names a file may refer to."""

MAX_OPCODES = 1000
"""A pickled `QuantizedWeight8bit` has about 100."""

_OPCODES = {opcode.code: opcode for opcode in pickletools.opcodes}
_LENGTH_BYTES = {"SHORT_BINBYTES": 1, "BINBYTES": 4, "BINBYTES8": 8}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLE_SIZES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUSH_ARGUMENT = frozenset({"SHORT_BINUNICODE", "BININT", "BININT1", "BININT2"})


@dataclass(frozen=True)
class StoredArray:
    """Where an array's values lie in a file."""

    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int
    """Bytes from the start of the file."""
    column_major: bool

    @property
    def num_bytes(self) -> int:
        """Size of the values."""
        return math.prod(self.shape) * self.dtype.itemsize

    def map(self, path: Path) -> np.memmap:
        """The array, read from the file as its elements are used."""
        order = "F" if self.column_major else "C"
        return np.memmap(path, self.dtype, mode="r", offset=self.offset, shape=self.shape, order=order)  # type: ignore[call-overload]


@dataclass(frozen=True)
class StoredTensor:
    """A plain array, or an int8 one with its scales."""

    values: StoredArray
    scales: StoredArray | None


def locate_tensor(path: Path) -> StoredTensor:
    """The tensor of a pickle file.

    Raises `CheckpointError` where the file is truncated, longer than its pickle, or holds anything but one array or
    one `QuantizedWeight8bit` of arrays.
    """
    try:
        with path.open("rb") as file:
            return _Machine(path, file).run()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error


@dataclass(frozen=True)
class _Global:
    name: str


@dataclass(frozen=True)
class _Payload:
    offset: int
    num_bytes: int


@dataclass
class _Dtype:
    dtype: np.dtype
    built: bool = False


@dataclass
class _Array:
    stored: StoredArray | None = None


@dataclass
class _Quantized:
    fields: dict[object, object] = field(default_factory=dict)


class _Mark:
    pass


class _Machine:
    """The stack machine of the pickle format, on stand-ins."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._size = path.stat().st_size
        self._stack: list[object] = []
        self._memo: list[object] = []
        self._actions: dict[str, Callable[[object], None]] = {
            "PROTO": lambda _: None,
            "FRAME": lambda _: None,
            "MARK": lambda _: self._stack.append(_Mark()),
            "EMPTY_DICT": lambda _: self._stack.append({}),
            "MEMOIZE": lambda _: self._memo.append(self._peek()),
            "BINGET": self._recall,
            "LONG_BINGET": self._recall,
            "TUPLE": lambda _: self._stack.append(tuple(self._pop_to_mark())),
            "SETITEMS": self._set_items,
            "INST": lambda name: self._push_global(str(name).replace(" ", ".")),
            "GLOBAL": lambda name: self._push_global(str(name).replace(" ", ".")),
            "STACK_GLOBAL": lambda _: self._push_global(".".join(str(part) for part in self._pop(2, str))),
            "REDUCE": self._reduce,
            "NEWOBJ": self._new_object,
            "BUILD": self._build,
        }
        # Arguments of others are not even read: their lengths may be absurd.
        self._understood = self._actions.keys() | _PUSH_ARGUMENT | _CONSTANTS.keys() | _TUPLE_SIZES.keys()

    def run(self) -> StoredTensor:
        for _ in range(MAX_OPCODES):
            code = self._file.read(1)
            opcode = _OPCODES.get(code.decode("latin-1"))
            if opcode is None:
                raise self._refuse("the file is truncated" if not code else f"byte {code!r} is no pickle instruction")
            if opcode.name == "STOP":
                return self._result()
            self._step(opcode)
        raise self._refuse(f"more than {MAX_OPCODES} instructions")

    def _step(self, opcode: pickletools.OpcodeInfo) -> None:
        name = opcode.name
        if name in _LENGTH_BYTES:
            self._stack.append(self._payload(_LENGTH_BYTES[name]))
            return
        if name not in self._understood:
            raise self._refuse(f"instruction {name} is none that a pickled array has")
        try:
            argument = opcode.arg.reader(self._file) if opcode.arg else None
        except ValueError:
            raise self._refuse("the file is truncated, or no pickle") from None
        if name in _PUSH_ARGUMENT:
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name in _TUPLE_SIZES:
            self._stack.append(tuple(self._pop(_TUPLE_SIZES[name])))
        else:
            self._actions[name](argument)

    def _payload(self, num_length_bytes: int) -> _Payload:
        length = int.from_bytes(self._file.read(num_length_bytes), "little")
        offset = self._file.tell()
        if offset + length > self._size:
            raise self._refuse(f"the file is truncated: it ends at byte {self._size}, its data at {offset + length}")
        self._file.seek(length, 1)
        return _Payload(offset, length)

    def _peek(self) -> object:
        if not self._stack:
            raise self._malformed()
        return self._stack[-1]

    def _pop(self, count: int, kind: type = object) -> list[object]:
        start = len(self._stack) - count
        if start < 0 or not all(isinstance(value, kind) for value in self._stack[start:]):
            raise self._malformed()
        popped = self._stack[start:]
        del self._stack[start:]
        return popped

    def _pop_to_mark(self) -> list[object]:
        marks = [i for i, value in enumerate(self._stack) if isinstance(value, _Mark)]
        if not marks:
            raise self._malformed()
        popped = self._stack[marks[-1] + 1 :]
        del self._stack[marks[-1] :]
        return popped

    def _recall(self, index: object) -> None:
        if not isinstance(index, int) or index >= len(self._memo):
            raise self._malformed()
        self._stack.append(self._memo[index])

    def _set_items(self, _: object) -> None:
        items = self._pop_to_mark()
        target = self._peek()
        keys, values = items[::2], items[1::2]
        if not isinstance(target, dict) or len(keys) != len(values) or not all(isinstance(k, str) for k in keys):
            raise self._malformed()
        target.update(zip(keys, values, strict=True))

    def _push_global(self, name: str) -> None:
        # The module moved in numpy 2.
        name = name.replace("numpy._core.", "numpy.core.", 1)
        if name not in GLOBALS:
            raise self._refuse(f"it refers to {name[:200]!r}; only {', '.join(sorted(GLOBALS))} are accepted")
        self._stack.append(_Global(name))

    def _reduce(self, _: object) -> None:
        function, arguments = self._pop(2)
        if not isinstance(function, _Global) or not isinstance(arguments, tuple) or len(arguments) != 3:
            raise self._malformed()
        if function.name == RECONSTRUCT and arguments[:2] == (_Global(NDARRAY), (0,)):
            self._stack.append(_Array())
        elif function.name == DTYPE and arguments[1:] == (False, True):
            self._stack.append(_Dtype(self._dtype(arguments[0])))
        else:
            raise self._malformed()

    def _dtype(self, code: object) -> np.dtype:
        if code == "f4":
            return np.dtype(np.float32)
        if code == "i1":
            return np.dtype(np.int8)
        if code == _Global(BFLOAT16):
            return np.dtype(ml_dtypes.bfloat16)
        shown = repr(code)[:40] if isinstance(code, str) else "of an unknown kind"
        raise self._refuse(f"an array has dtype {shown}; expected 'f4', 'i1' or ml_dtypes.bfloat16")

    def _new_object(self, _: object) -> None:
        class_, arguments = self._pop(2)
        if class_ != _Global(QUANTIZED) or arguments != ():
            raise self._malformed()
        self._stack.append(_Quantized())

    def _build(self, _: object) -> None:
        state = self._pop(1)[0]
        target = self._peek()
        if isinstance(target, _Quantized) and isinstance(state, dict) and not target.fields:
            target.fields.update(state)
        elif isinstance(target, _Dtype) and isinstance(state, tuple) and len(state) == 8 and not target.built:
            if state[1] not in ("<", "|"):
                raise self._refuse("an array is not little-endian")
            target.built = True
        elif isinstance(target, _Array) and isinstance(state, tuple) and len(state) == 5 and target.stored is None:
            target.stored = self._stored(*state)
        else:
            raise self._malformed()

    def _stored(self, version: object, shape: object, dtype: object, column_major: object, data: object) -> StoredArray:
        if (
            version != 1
            or not isinstance(shape, tuple)
            or not all(type(size) is int and size >= 0 for size in shape)
            or not isinstance(dtype, _Dtype)
            or not isinstance(column_major, bool)
            or not isinstance(data, _Payload)
        ):
            raise self._malformed()
        stored = StoredArray(shape, dtype.dtype, data.offset, column_major)
        if stored.num_bytes != data.num_bytes:
            raise self._refuse(
                f"an array of shape {list(shape)} and dtype {dtype.dtype} has {data.num_bytes} bytes; expected "
                f"{stored.num_bytes}"
            )
        return stored

    def _result(self) -> StoredTensor:
        if self._file.tell() != self._size:
            raise self._refuse(f"the file has {self._size} bytes, its pickle ends at {self._file.tell()}")
        value = self._stack[0] if len(self._stack) == 1 else None
        if isinstance(value, _Array) and value.stored is not None:
            return StoredTensor(value.stored, None)
        if isinstance(value, _Quantized) and value.fields.keys() == {"weight", "scales"}:
            weight, scales = value.fields["weight"], value.fields["scales"]
            if isinstance(weight, _Array) and isinstance(scales, _Array) and weight.stored and scales.stored:
                return StoredTensor(weight.stored, scales.stored)
        raise self._refuse("it holds neither an array nor a QuantizedWeight8bit of arrays")

    def _malformed(self) -> CheckpointError:
        return self._refuse(f"its instructions up to byte {self._file.tell()} make no array")

    def _refuse(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: not a pickled tensor: {why}")
