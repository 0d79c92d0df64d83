"""An environment that holds what a reward server needs and nothing else, made without a network.

A virtual environment of its own, into which the distributions that a requirements file names, with what these need,
are linked from the environment of the tests. So the file is tested to be complete.
"""

from __future__ import annotations

import re
import sys
import venv
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[2]
#: Of DigenRL itself, which is installed without its dependencies.
OWN = ("digenrl",)


def second_environment(folder: Path, requirements: Path) -> Path:
    """Make it; returns its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for name in _needed(requirements):
        for top in _tops(name):
            link = site / top.name
            if not link.exists():
                link.symlink_to(top)
    for package in OWN:
        (site / package).symlink_to(REPOSITORY / package)
    return folder / "bin" / "python"


def _needed(requirements: Path) -> set[str]:
    """Names of the distributions in a requirements file, with everything they need."""
    lines = [line.partition("#")[0].strip() for line in requirements.read_text().splitlines()]
    waiting, found = [Requirement(line) for line in lines if line], set[str]()
    while waiting:
        requirement = waiting.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if (requirement.marker is None or requirement.marker.evaluate({"extra": ""})) and name not in found:
            found.add(name)
            waiting += [Requirement(line) for line in distribution(name).requires or ()]
    return found


def _tops(name: str) -> set[Path]:
    """Files and directories of a distribution, directly below its site-packages."""
    found = distribution(name)
    site = Path(str(found.locate_file("")))
    tops = {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}
    return {site / top for top in tops}
