"""The exceptions of metal_marlin, one per kind of error; messages are one line."""


class MarlinError(Exception):
    """Any error of the library."""


class InvalidArgumentError(MarlinError, ValueError):
    """An invalid argument; the message names it and both values."""


class UnsupportedError(MarlinError, NotImplementedError):
    """A feature that this build, device or format lacks."""


class MalformedFileError(MarlinError, ValueError):
    """A file that contradicts itself or its format."""


class NonFiniteInputError(MarlinError, ValueError):
    """NaN or infinity where finite numbers are required."""


class FileError(MarlinError, OSError):
    """A file that cannot be read or written."""


class OutOfMemoryError(MarlinError, MemoryError):
    """Not enough memory."""


class QueueFullError(MarlinError, RuntimeError):
    """A queue without room; later it may have some."""


class DeviceLostError(MarlinError, RuntimeError):
    """A device that no longer answers."""
