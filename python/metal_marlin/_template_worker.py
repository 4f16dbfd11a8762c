"""Renders chat templates in a process of its own: a script, which imports nothing of the package.

Templates are files of untrusted models. Jinja's sandbox keeps them from Python, the limits of this
process from time, memory, files and the network: `chat_template.py` starts it, and ends it where a
template does not. Frames on stdin and stdout are a length, four bytes, and that many bytes. The
first frame in has the module path; every other one has a template and its variables, in Python's
marshal format, which only the trusted side writes. A frame out is the letter of an outcome, and
UTF-8 text.
"""

from __future__ import annotations

import json
import marshal
import os
import signal
import struct
import sys
import threading
import time
from datetime import datetime
from typing import Any

TIME_LIMIT = 1.0  # Seconds of processor time.
MEMORY_LIMIT = 256 << 20  # Bytes beyond what the process with Jinja takes.
OUTPUT_LIMIT = 4 << 20  # Bytes of UTF-8.
MEMORY_EXIT = 3  # The exit code of a process that the watch below has ended.

# Outcomes.
READY, WITHOUT_JINJA = b"+", b"-"
TEXT, REFUSED, ERROR, TOO_LONG, OUT_OF_MEMORY = b"t", b"r", b"e", b"l", b"m"


def read_exactly(descriptor: int, count: int) -> bytes:
    """Bytes of a pipe; none at its end."""
    data = bytearray()
    while len(data) < count:
        piece = os.read(descriptor, min(count - len(data), 1 << 20))
        if not piece:
            return b""
        data += piece
    return bytes(data)


def read_frame(descriptor: int) -> bytes:
    header = read_exactly(descriptor, 4)
    return read_exactly(descriptor, struct.unpack(">I", header)[0]) if header else b""


def write_frame(descriptor: int, data: bytes) -> None:
    left = memoryview(struct.pack(">I", len(data)) + data)
    while left:
        left = left[os.write(descriptor, left) :]


def make_environment() -> Any:
    """The environment that templates are written for, as in transformers."""
    import jinja2.debug  # What an exception would import: later no file can be opened.
    import jinja2.ext
    import jinja2.nodes
    import jinja2.runtime
    import jinja2.sandbox
    import jinja2.utils

    class Generation(jinja2.ext.Extension):
        """{% generation %}: marks answers, for training; renders its body."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("body")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def body(self, caller: Any) -> Any:
            return caller()

    class Refusal(jinja2.TemplateError):
        """Raised by raise_exception."""

    class Dict:
        """`dict`, without the attributes of the class."""

        def __call__(self, *items: Any, **named: Any) -> dict[Any, Any]:
            return dict(*items, **named)

        def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
            return dict.fromkeys(*arguments)

    class Namespace(jinja2.utils.Namespace):  # type: ignore[misc, name-defined, unused-ignore]
        """`namespace`, without names that Python gives a meaning."""

        def __init__(*items: Any, **named: Any) -> None:
            self, values = items[0], dict(*items[1:], **named)
            for name in values:
                check_name(name)
            jinja2.utils.Namespace.__init__(self, values)

        def __setitem__(self, name: str, value: Any) -> None:
            check_name(name)
            super().__setitem__(name, value)

    def check_name(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.sandbox.SecurityError(f"a namespace cannot have the attribute {name!r}")

    def raise_exception(message: Any) -> None:
        raise Refusal(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["dict"] = Dict()
    environment.globals["namespace"] = Namespace
    environment.extend(refusal=Refusal)
    return environment


def place(error: BaseException) -> str:
    """The line of a template that an exception comes from: "line 7: ", or nothing."""
    line = getattr(error, "lineno", None)
    frames = error.__traceback__
    while frames is not None:
        if frames.tb_frame.f_code.co_filename == "<template>":
            line = frames.tb_lineno
        frames = frames.tb_next
    return "" if line is None else f"line {line}: "


def render(environment: Any, compiled: dict[str, Any], request: bytes) -> bytes:
    """A frame out."""
    text, variables = marshal.loads(request)
    try:
        if text not in compiled:
            # A model has one template, or a few.
            if len(compiled) >= 8:
                compiled.clear()
            compiled[text] = environment.from_string(text)
        pieces, length = [], 0
        for piece in compiled[text].generate(variables):
            pieces.append(piece)
            length += len(piece)
            if length > OUTPUT_LIMIT:
                return TOO_LONG
        rendered = "".join(pieces).encode()
        return TEXT + rendered if len(rendered) <= OUTPUT_LIMIT else TOO_LONG
    except environment.refusal as error:
        return REFUSED + str(error)[:4096].encode(errors="replace")
    except MemoryError:
        return OUT_OF_MEMORY
    except UnicodeEncodeError:
        return ERROR + b"makes characters that UTF-8 does not have"
    except Exception as error:
        message = str(error)[:4096] or type(error).__name__
        return ERROR + (place(error) + message).encode(errors="replace")


def address_space() -> int | None:
    """Bytes of the process; None where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGESIZE")
    except (OSError, ValueError):
        return None


def watch_memory() -> None:
    """Ends the process when it needs too much, for systems that do not limit address spaces."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024

    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    most = peak() + MEMORY_LIMIT

    def watch() -> None:
        while peak() <= most:
            time.sleep(0.01)
        os._exit(MEMORY_EXIT)

    threading.Thread(target=watch, daemon=True).start()


def warm_up(environment: Any) -> None:
    """Imports what templates need later, when no file can be opened."""
    import jinja2.constants  # noqa: F401

    datetime.now().astimezone()
    texts = [r"{{ 'a\n\u00e9' }}{{ a.b.c }}", "{% include 'a' %}", "{{ ''.__class__.x }}", "{%"]
    texts += [f"{{{{ '<a>' | {name} }}}}" for name in environment.filters]
    for text in texts:
        render(environment, {}, marshal.dumps((text, {"a": 1})))


def limit_resources(watched: bool) -> None:
    """Takes memory, and everything that needs a descriptor: files, sockets."""
    import resource

    used = address_space()
    if watched or used is None:
        watch_memory()
    else:
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_LIMIT, used + MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


def main() -> None:
    sys.path[:] = marshal.loads(read_frame(0))
    try:
        environment = make_environment()
    except ImportError:
        write_frame(1, WITHOUT_JINJA)
        return
    warm_up(environment)
    limit_resources("--watch-memory" in sys.argv)
    write_frame(1, READY)
    compiled: dict[str, Any] = {}
    while request := read_frame(0):
        # Without a handler the signal ends the process, whatever the interpreter is doing.
        signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT)
        answer = render(environment, compiled, request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(1, answer)


if __name__ == "__main__":
    main()
