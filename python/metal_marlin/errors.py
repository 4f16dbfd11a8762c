"""The exceptions of metal_marlin, one for each kind of error; messages are one line."""


class MarlinError(Exception):
    """Any error of the library."""


class InvalidArgumentError(MarlinError, ValueError):
    """An argument that cannot be: the message names it and both numbers."""


class UnsupportedError(MarlinError, NotImplementedError):
    """Something that this build, device or format cannot do."""


class MalformedFileError(MarlinError, ValueError):
    """A file whose content contradicts itself or its format."""


class NonFiniteInputError(MarlinError, ValueError):
    """NaN or infinity where numbers are needed."""


class FileError(MarlinError, OSError):
    """A file that cannot be read or written."""


class OutOfMemoryError(MarlinError, MemoryError):
    """Not enough memory."""


class DeviceLostError(MarlinError, RuntimeError):
    """A device that no longer answers."""
