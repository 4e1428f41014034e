"""Opening compressed files as the bytes they hold."""

import bz2
import gzip
import io
import lzma
from pathlib import Path
from typing import BinaryIO, cast

COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
_BLOCK = 1 << 20


def open_binary(file: Path) -> BinaryIO:
    """The file's bytes, decompressed by its suffix. Reading a cut-off archive raises EOFError."""
    match file.suffix.lower():
        case ".gz":
            return cast(BinaryIO, gzip.open(file))
        case ".xz":
            return cast(BinaryIO, lzma.open(file))
        case ".bz2":
            return cast(BinaryIO, bz2.open(file))
        case ".zst":
            return cast(BinaryIO, io.BufferedReader(_Zstandard(file), _BLOCK))
    return file.open("rb")


class _Zstandard(io.RawIOBase):
    """A .zst file of any number of frames. The library's own reader takes a cut one as whole."""

    def __init__(self, file: Path) -> None:
        try:
            import zstandard
        except ImportError as e:
            raise ValueError(
                f"the package zstandard is not installed; {file} cannot be decompressed; "
                "pip install zstandard"
            ) from e
        self._error = zstandard.ZstdError
        self._open = zstandard.ZstdDecompressor().decompressobj
        self._file = file.open("rb")
        self._frame = self._open()
        self._fresh = True  # nothing of the present frame was read
        self._out = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._out:
            raw = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame, self._fresh = self._open(), True
            raw = raw or self._file.read(_BLOCK)
            if not raw:
                if self._fresh:
                    return 0
                raise EOFError("the last frame has no end")
            self._fresh = False
            try:
                self._out = memoryview(self._frame.decompress(raw))
            except self._error as e:
                raise OSError(str(e)) from e
        count = min(len(buffer), len(self._out))
        buffer[:count] = self._out[:count]
        self._out = self._out[count:]
        return count

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
