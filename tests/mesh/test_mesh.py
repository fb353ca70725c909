"""Models that are split over devices: the tests of `MODULES`, in a process with eight devices.

The number of CPU devices is set before JAX starts, and for a process as a whole.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import product
import pytest

SHARES_NOTHING = True
TESTS = Path(__file__).parent
PRODUCT = "product_on_eight_devices.py"
MODULES = (
    "on_eight_devices.py",
    PRODUCT,
    "layers_on_eight_devices.py",
    "exact_on_eight_devices.py",
    "groups_on_eight_devices.py",
    "engine_on_eight_devices.py",
    "engine_in_groups_on_eight_devices.py",
    "text_on_eight_devices.py",
    "bench_on_eight_devices.py",
)
DEVICES = "--xla_force_host_platform_device_count=8"


def run(mark: str, modules: Sequence[str] = MODULES, family: str = "") -> None:
    """family: of the product, only its points."""
    environment = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "-m", mark]
    command += ["-k", f"[{family}-"] if family else []
    ran = subprocess.run(
        [*command, *(str(TESTS / module) for module in modules)],
        cwd=TESTS.parents[1],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert ran.returncode == 0 and "passed" in ran.stdout, ran.stdout[-8000:] + ran.stderr[-2000:]


def test_fast_tests_on_eight_devices():
    run("not slow")


@pytest.mark.slow
@pytest.mark.parametrize("module", [module for module in MODULES if module != PRODUCT])
def test_slow_tests_on_eight_devices(module):
    run("slow", [module])


@pytest.mark.slow
@pytest.mark.parametrize("family", [*product.FAMILIES, *product.WIDE])
def test_every_drafter_of_a_family_on_eight_devices(family):
    run("slow", [PRODUCT], family.replace(" ", "_"))
