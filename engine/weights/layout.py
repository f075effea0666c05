"""The files of a checkpoint folder: one file, or several that an index lists with the tensors of each."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from engine.errors import CheckpointError
from engine.weights.jsonfile import read_json_object

Shards = dict[Path, frozenset[str] | None]
"""Files, each with the tensor names that the index lists for it; None: there is no index."""


@dataclass(frozen=True)
class Layout:
    """How the files of one format are called."""

    single: str
    """Where there is one file."""
    index: str
    """Where there are several."""
    suffix: str

    def is_in(self, directory: Path) -> bool:
        """Whether a folder holds weights in this format."""
        return (directory / self.single).exists() or (directory / self.index).exists()

    def shards(self, path: Path) -> Shards:
        """The files of a folder, or the one that `path` is. Raises `CheckpointError` where there is none, the index is
        malformed, or a file stands beside an index."""
        if not path.is_dir():
            return {path: None}
        single, index = path / self.single, path / self.index
        if single.exists() and index.exists():
            raise CheckpointError(
                f"{path}: holds both {self.single} and {self.index}; remove the one that is out of date"
            )
        if single.exists():
            return {single: None}
        if not index.exists():
            raise CheckpointError(f"{path}: expected {self.single} or {self.index}")
        return self._read_index(index)

    def _read_index(self, index: Path) -> Shards:
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: expected an object 'weight_map' from tensor names to file names")
        names: dict[Path, set[str]] = {}
        for name, file in weight_map.items():
            # Lexical, because files in the Hugging Face cache are symbolic links to another directory.
            if not isinstance(file, str) or Path(file).name != file or "\\" in file or not file.endswith(self.suffix):
                raise CheckpointError(
                    f"{index}: tensor {name!r} is said to be in {file!r}; expected the plain name of a {self.suffix} "
                    "file in the same directory"
                )
            names.setdefault(index.parent / file, set()).add(name)
        return {file: frozenset(listed) for file, listed in names.items()}

    def check_names(self, file: Path, found: Iterable[str], listed: frozenset[str] | None) -> None:
        """Raises `CheckpointError` where a file does not hold what the index lists for it."""
        if listed is None:
            return
        names = frozenset(found)
        if absent := sorted(listed - names):
            raise CheckpointError(f"{file}: lacks tensor {absent[0]!r}, which {self.index} lists for it")
        if unlisted := sorted(names - listed):
            raise CheckpointError(f"{file}: holds tensor {unlisted[0]!r}, which {self.index} does not list for it")


SAFETENSORS = Layout("model.safetensors", "model.safetensors.index.json", ".safetensors")
TORCH = Layout("pytorch_model.bin", "pytorch_model.bin.index.json", ".bin")
