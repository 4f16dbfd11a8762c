"""Threads that the system cannot start: exit code 4 and one line with both numbers."""

from __future__ import annotations

import resource
import sys
import unittest

from command_line import CommandTestCase, run

MEMORY = 4
ADDRESS_SPACE = 600_000 * 1024


def limit_address_space() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))


class ThreadLimit(CommandTestCase):
    """500 stacks of 8 MiB exceed the limit."""

    @unittest.skipUnless(sys.platform == "linux", "address space is limited on Linux only")
    def test_more_threads_than_fit(self) -> None:
        result = run("bench", "gemm", "--shape", "1,64,64", "--threads", 500,
                     preexec_fn=limit_address_space)
        self.assertEqual(result.returncode, MEMORY, result.stderr)
        self.assertEqual(result.stdout, "")
        self.assertRegex(result.stderr, r"^[^\n]*threads: \d+ of 500 can run: [^\n]*\n$")


if __name__ == "__main__":
    unittest.main()
