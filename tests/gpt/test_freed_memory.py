"""What the process does with memory that is free again."""

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
from gpt import runtime
if sys.argv[1] == "keep":
    runtime.keep_freed_memory()
torch.set_num_threads(1)
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.empty(2**23).fill_(1)
before = faults()
for _ in range(10):
    torch.empty(2**23).fill_(1)  # 32 MB: 8,192 pages
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc's allocator")
def test_freed_memory_is_used_again() -> None:
    """Without it every tensor's pages are the system's and cleared again, and with it none is."""
    faults = {}
    for what in ("keep", "leave"):
        ran = subprocess.run(
            [sys.executable, "-c", SCRIPT, what],
            capture_output=True, text=True, check=True, timeout=120,
        )  # fmt: skip
        faults[what] = int(ran.stdout)
    assert faults["keep"] < 1000
    # Huge pages, where the system gives them unasked, are few.
    assert faults["leave"] > 10 * faults["keep"] or faults["leave"] < 1000
