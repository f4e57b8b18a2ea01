"""compute-sanitizer over tests of one kernel: what every test file of a CUDA kernel runs."""

import os
import subprocess
import sys
from pathlib import Path


def assert_clean(tool, kernel, file, names):
    """Run tests of a file under a tool of compute-sanitizer that watches the kernels named `kernel`."""
    # The driver's bindings ask for functions that this driver has not, which is no error of the kernel's.
    kernels_only = ["--kernel-name", f"kns={kernel}", "--report-api-errors", "no"]
    sanitizer = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *kernels_only]
    tests = [f"{file}::{name}" for name in names]
    done = subprocess.run(
        [*sanitizer, sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *tests],
        env={**os.environ, "PATH": os.environ["PATH"] + ":/usr/local/cuda/bin"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
