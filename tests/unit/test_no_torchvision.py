"""Nothing imports torchvision: its image functions give other pixels than Pillow's, and few environments have it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("digenrl", "flows", "tasks", "workers", "storage", "benchmarks")

PROBE = """
import importlib, pkgutil, sys
import digenrl
for module in pkgutil.walk_packages(digenrl.__path__, "digenrl."):
    importlib.import_module(module.name)
print(sorted({"torchvision"} & set(sys.modules)))
"""


def test_no_source_file_names_it() -> None:
    for package in PACKAGES:
        for file in (REPOSITORY / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not any(name.partition(".")[0] == "torchvision" for name in names), file


@pytest.mark.slow
def test_importing_every_module_of_the_core_does_not_import_it() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=240)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
