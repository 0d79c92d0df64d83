"""Processor, memory, CUDA devices, disk, ports, and the servers that run."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path

import psutil

from flows.checks.finding import Finding
from flows.services.ports import is_free
from flows.services.specs import SPECS
from flows.services.state import ServicesDirectory, State

GB = 10**9
#: Two workers with torch and the two servers hold about this much together.
MEMORY_BYTES = 3 * GB
DISK_BYTES = 2 * GB
DASK_PORT = 8786


def processor() -> list[Finding]:
    """Cores this process may use, and free memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = psutil.virtual_memory()
    size = f"{memory.available / GB:.1f} of {memory.total / GB:.1f} GB free"
    findings = [
        Finding("ok", "CPU cores", str(cores))
        if cores > 1
        else Finding(
            "note",
            "CPU cores",
            "1; two workers share it",
            "digenrl train tiny-ocr cluster.workers=1 schedule.layout=colocated",
        )
    ]
    if memory.available >= MEMORY_BYTES:
        return [*findings, Finding("ok", "memory", size)]
    remedy = f"a run with two workers and both servers takes about {MEMORY_BYTES / GB:.0f} GB; end other programs"
    return [*findings, Finding("note", "memory", size, remedy)]


def torch_devices() -> list[Finding]:
    """Threads of torch, and the CUDA devices it sees."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return [Finding("missing", "torch", f"cannot be imported: {error}", "pip install --force-reinstall torch")]
    findings = [Finding("ok", "torch threads", f"{torch.get_num_threads()} here, 1 in each local CPU worker")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        reason = str(caught[0].message).splitlines()[0] if caught else "torch finds no device or no driver"
        return [*findings, Finding("note", "CUDA", f"{reason}; runs use cluster.device=cpu")]
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        detail = f"{device.name}, {device.total_memory / GB:.0f} GB, capability {device.major}.{device.minor}"
        findings.append(Finding("ok", f"CUDA {index}", detail))
    return findings


def disk(home: Path) -> list[Finding]:
    """Whether DIGENRL_HOME can be written, and the space there."""
    existing = next(path for path in (home, *home.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        what = "not writable" if existing.is_dir() else "a file"
        remedy = "export DIGENRL_HOME=/a/directory/you/can/write"
        return [Finding("missing", "DIGENRL_HOME", f"{home}: {existing} is {what}", remedy)]
    free = shutil.disk_usage(existing).free
    detail = f"{home}, {free / GB:.1f} GB free"
    if free < DISK_BYTES:
        return [Finding("note", "DIGENRL_HOME", detail, f"keep {DISK_BYTES / GB:.0f} GB free, or set DIGENRL_HOME")]
    return [Finding("ok", "DIGENRL_HOME", detail)]


def services(home: Path) -> list[Finding]:
    """The servers of this home, who uses them, and whether the first ports are free."""
    directory = ServicesDirectory(home)
    state = directory.read_state() if directory.root.is_dir() else State()
    running = state.servers if state.is_supervised else {}
    findings = []
    for name, server in running.items():
        users = [lease.owner for lease in directory.living_leases().values() if name in lease.ports]
        detail = f"{server.status} at {server.url}, used by {', '.join(users) or 'nobody'}"
        if server.status == "failed":
            findings.append(Finding("note", f"{name} server", detail, f"read {server.log}"))
        else:
            findings.append(Finding("ok", f"{name} server", detail))
    if not running:
        findings.append(Finding("ok", "servers", "none run; train and serve start them"))
    ours = {server.port: name for name, server in running.items()}
    first_ports = {**{name: spec.first_port for name, spec in SPECS.items()}, "dask": DASK_PORT}
    for name, port in first_ports.items():
        if port in ours:
            findings.append(Finding("ok", f"port {port}", f"used by DigenRL's own {ours[port]} server"))
        elif is_free(port):
            findings.append(Finding("ok", f"port {port}", f"free ({name})"))
        else:
            detail = f"used by another program ({name}); the next free one is used instead"
            findings.append(Finding("note", f"port {port}", detail))
    return findings
