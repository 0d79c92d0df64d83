"""Python, packages, optional extras and tools."""

from __future__ import annotations

import platform
import shutil
import sys
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from flows.checks.finding import Finding
from flows.startup import check_shadowing

#: Shown one by one; the other requirements share a line unless something is wrong with them.
HEADLINES = (
    *("torch", "diffusers", "transformers", "peft", "dask", "distributed", "prefect", "mlflow"),
    "rapidocr-onnxruntime",
)
REINSTALL = "pip install -e ."

EXTRAS = {
    "dask-cuda": ("several CUDA devices in one machine", "pip install -e '.[gpu-cu13]'  (or gpu-cu12)"),
    "distributed-ucxx": ("UCX between workers", "pip install -e '.[gpu-cu13]'  (or gpu-cu12)"),
    "s3fs": ("s3:// URLs", "pip install -e '.[s3]'"),
    "ddddocr": ("judging runs that train on OCR", "pip install -e '.[gold]'"),
}
#: Tool -> (program names, what it is for).
TOOLS = {
    "chromium": (("chromium", "chromium-browser", "google-chrome"), "tests that look at the Prefect and MLflow pages"),
    "terraform": (("terraform",), "tests of infra/terraform"),
    "weed": (("weed",), "tests against an S3 server"),
}


def python() -> list[Finding]:
    """The interpreter against `requires-python`."""
    wanted, found = metadata.metadata("digenrl")["Requires-Python"], platform.python_version()
    if found in SpecifierSet(wanted, prereleases=True):
        return [Finding("ok", "Python", f"{found}  {sys.executable}")]
    return [Finding("missing", "Python", f"{found}, needed {wanted}", "make PYTHON=/path/to/python3.12")]


def packages() -> list[Finding]:
    """Every required package against its range, and the OCR package's onnxruntime."""
    required = [r for r in _requirements("digenrl") if r.name not in HEADLINES]
    headlines = [r for r in _requirements("digenrl") if r.name in HEADLINES]
    onnx = [r for r in _requirements("rapidocr-onnxruntime") if r.name == "onnxruntime"]
    shown = [check_package(r) for r in sorted(headlines, key=lambda r: HEADLINES.index(r.name)) + onnx]
    others = [check_package(r) for r in required]
    wrong = [finding for finding in others if finding.status != "ok"]
    if not wrong:
        return [*shown, Finding("ok", "other packages", f"{len(others)} within their ranges")]
    return [*shown, *wrong]


def check_package(requirement: Requirement) -> Finding:
    """One installed package against its range."""
    name, wanted = requirement.name, requirement.specifier
    version = _version(name)
    if version is None:
        return Finding("missing", name, f"not installed, needed {wanted or 'any version'}", REINSTALL)
    if version not in SpecifierSet(str(wanted), prereleases=True):
        return Finding("missing", name, f"{version}, needed {wanted}", f"pip install '{name}{wanted}'")
    return Finding("ok", name, f"{version}  ({wanted})" if wanted else version)


def shadowing() -> list[Finding]:
    """Whether a user's file hides one of our packages."""
    problem = check_shadowing()
    return [Finding("missing", "imports", problem) if problem else Finding("ok", "imports", "no package is hidden")]


def extras() -> list[Finding]:
    """Optional packages."""
    findings = []
    for name, (purpose, remedy) in EXTRAS.items():
        found = [_version(candidate) for candidate in (name, f"{name}-cu12", f"{name}-cu13")]
        version = next((v for v in found if v is not None), None)
        detail = f"not installed; only for {purpose}" if version is None else f"{version}  for {purpose}"
        findings.append(Finding("note" if version is None else "ok", name, detail, "" if version else remedy))
    return findings


def tools() -> list[Finding]:
    """Programs that parts of the test suite use."""
    findings = []
    for name, (programs, purpose) in TOOLS.items():
        path = next(filter(None, map(shutil.which, programs)), None)
        detail = f"not found; only for {purpose}" if path is None else path
        findings.append(Finding("note" if path is None else "ok", name, detail))
    return findings


def _requirements(distribution: str) -> list[Requirement]:
    """What a distribution requires here, extras left out; nothing if it is not installed."""
    try:
        texts = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return []
    found = [Requirement(text) for text in texts]
    return [r for r in found if r.marker is None or r.marker.evaluate({"extra": ""})]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
