"""PyIceberg's FileIO over a Storage: metadata has the same durability, counters and injected faults as all files.

Metadata files are small: they are read in one call, and buffered and put in one call when closed. A data file that
PyIceberg itself writes is streamed. A file appears only if it was closed cleanly: PyIceberg closes its streams on an
error too, so a close during an error that was not active at the start drops the file (I3).
Made from properties (`py-io-impl`) or bound to a Storage with `LakeFileIO.over(storage)`.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from pyiceberg.io import FileIO, InputFile, InputStream, OutputFile, OutputStream
from pyiceberg.typedef import EMPTY_DICT, Properties

from floodmark.errors import NotFound
from floodmark.storage import Storage
from floodmark.storage import streams as storage_streams
from floodmark.storage.options import checked

_OPTION_OF_PROPERTY = {
    "s3.endpoint": "endpoint",
    "client.region": "region",
    "s3.region": "region",
    "s3.allow-http": "allow_http",
    "s3.force-virtual-addressing": "virtual_hosted_style",
    "s3.anonymous": "anonymous",
}
# The prefix of properties that PyIceberg does not define.
_OWN_PROPERTY = "floodmark.storage."
_SECRET_PROPERTIES = tuple(
    f"{group}.{name}"
    for group in ("s3", "client")
    for name in ("access-key-id", "secret-access-key", "session-token", "profile-name")
)
_READ_WHOLE = (".json", ".json.gz", ".avro", ".txt")
_STREAMED = (".parquet", ".orc")


class MissingFile(NotFound, FileNotFoundError):
    """NotFound that is also a FileNotFoundError, which PyIceberg expects."""

    @property
    def kind(self) -> str:
        return "NotFound"

    # OSError would print its errno and strerror.
    __str__ = NotFound.__str__


def _missing(error: NotFound) -> MissingFile:
    return MissingFile(error.message, advice=error.advice, **error.facts)


class LakeInputFile(InputFile):
    """A file to be read by PyIceberg."""

    def __init__(self, storage: Storage, location: str) -> None:
        super().__init__(location)
        self._storage = storage

    def __len__(self) -> int:
        try:
            return self._storage.size(self.location)
        except NotFound as error:
            raise _missing(error) from error

    def exists(self) -> bool:
        return self._storage.exists(self.location)

    def open(self, seekable: bool = True) -> InputStream:
        try:
            if self.location.endswith(_READ_WHOLE):
                return io.BytesIO(self._storage.read(self.location))
            return self._storage.open_input(self.location)
        except NotFound as error:
            raise _missing(error) from error


class LakeOutputFile(OutputFile):
    """A file to be written by PyIceberg. Its length is known, without a request, once its stream was closed."""

    def __init__(self, storage: Storage, location: str) -> None:
        super().__init__(location)
        self._storage = storage
        self._size_bytes: int | None = None

    def __len__(self) -> int:
        if self._size_bytes is not None:
            return self._size_bytes
        return len(self.to_input_file())

    def exists(self) -> bool:
        return self._storage.exists(self.location)

    def to_input_file(self) -> LakeInputFile:
        return LakeInputFile(self._storage, self.location)

    def create(self, overwrite: bool = False) -> OutputStream:
        """A stream whose clean close makes the file; without `overwrite`, that close claims the name."""
        if overwrite and self.location.endswith(_STREAMED):
            return _StreamedOutput(self, self._storage.writer(self.location))
        return _BufferedOutput(self, claim=not overwrite)

    def publish(self, data: bytes, claim: bool) -> None:
        if not claim:
            self._storage.put(self.location, data)
        elif not self._storage.put_if_absent(self.location, data):
            raise FileExistsError(f"a file of this name exists: {self.location}")

    def closed_at(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes


class _Output:
    """A stream that knows whether it is closed cleanly or because of an error."""

    def __init__(self, file: LakeOutputFile) -> None:
        self._file = file
        # A caller may write while it handles an error: only an error that is new since counts.
        self._error_at_start = sys.exception()
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        error = sys.exception()
        self._close(None if error is self._error_at_start else error)

    def tell(self) -> int:
        raise NotImplementedError

    def _drop(self, error: BaseException) -> None:
        raise NotImplementedError

    def _keep(self) -> None:
        raise NotImplementedError

    def _close(self, error: BaseException | None) -> None:
        if self._closed:
            return
        self._closed = True
        if error is not None:
            self._drop(error)
            return
        size_bytes = self.tell()
        self._keep()
        self._file.closed_at(size_bytes)

    def flush(self) -> None:
        """Nothing to do: bytes become durable, and visible, together at the close."""

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("write to a closed stream")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exctype: type[BaseException] | None, excinst: BaseException | None, exctb: TracebackType | None
    ) -> None:
        self._close(excinst)


class _BufferedOutput(_Output):
    """A small file: held in memory, put in one call."""

    def __init__(self, file: LakeOutputFile, *, claim: bool) -> None:
        super().__init__(file)
        self._buffer = io.BytesIO()
        self._claim = claim

    def write(self, b: bytes) -> int:
        self._check_open()
        return self._buffer.write(b)

    def tell(self) -> int:
        return self._buffer.tell()

    def _drop(self, error: BaseException) -> None:
        self._buffer.close()

    def _keep(self) -> None:
        self._file.publish(self._buffer.getvalue(), self._claim)


class _StreamedOutput(_Output):
    """A file of any size, in bounded memory."""

    def __init__(self, file: LakeOutputFile, context: AbstractContextManager[storage_streams.OutputStream]) -> None:
        super().__init__(file)
        self._context = context
        self._stream = context.__enter__()

    def write(self, b: bytes) -> int:
        self._check_open()
        return self._stream.write(b)

    def tell(self) -> int:
        return self._stream.tell()

    def _drop(self, error: BaseException) -> None:
        self._context.__exit__(type(error), error, error.__traceback__)

    def _keep(self) -> None:
        self._context.__exit__(None, None, None)


class LakeFileIO(FileIO):
    """PyIceberg's access to files, through one Storage."""

    def __init__(self, properties: Properties = EMPTY_DICT, *, storage: Storage | None = None) -> None:
        super().__init__(properties)
        self.storage = Storage(_options(properties)) if storage is None else storage

    @classmethod
    def over(cls, storage: Storage) -> LakeFileIO:
        """Bound to an existing storage: same counters, same faults."""
        return cls(storage=storage)

    def __reduce__(self) -> tuple[Callable[[Storage], LakeFileIO], tuple[Storage]]:
        # Not the properties: a catalog puts its database address there, perhaps with a password (I18).
        return LakeFileIO.over, (self.storage,)

    def new_input(self, location: str) -> LakeInputFile:
        return LakeInputFile(self.storage, location)

    def new_output(self, location: str) -> LakeOutputFile:
        return LakeOutputFile(self.storage, location)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        """Delete a file; one that does not exist is deleted already."""
        self.storage.delete(location if isinstance(location, str) else location.location)


def _options(properties: Properties) -> dict[str, str]:
    # Refused here by name, so that credentials are not ignored silently.
    checked({name: "" for name in _SECRET_PROPERTIES if name in properties})
    own = {name.removeprefix(_OWN_PROPERTY): str(properties[name]) for name in properties if _is_own(name)}
    return own | {option: str(properties[name]) for name, option in _OPTION_OF_PROPERTY.items() if name in properties}


def _is_own(name: str) -> bool:
    return name.startswith(_OWN_PROPERTY)


def with_options(properties: Properties, options: Mapping[str, str]) -> dict[str, str]:
    """A catalog's properties; those of a storage (endpoint, region, limits) are the defaults."""
    said = _options(properties)
    names = {option: name for name, option in _OPTION_OF_PROPERTY.items()}
    inherited = {
        names.get(option, _OWN_PROPERTY + option): value for option, value in options.items() if option not in said
    }
    return {**inherited, **properties}
