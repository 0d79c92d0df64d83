"""The shipped model and the OCR recogniser, for real."""

from __future__ import annotations

import time

from flows.checks.finding import Finding
from flows.checks.software import REINSTALL

NUMBER = "042"


def model() -> list[Finding]:
    """Load the tiny pipeline that ships with DigenRL."""
    started = time.perf_counter()
    try:
        from digenrl.config import ModelConfig
        from digenrl.models.registry import load_model

        loaded = load_model(ModelConfig())
    except Exception as error:
        return [Finding("missing", "shipped model", _reason(error), REINSTALL)]
    size = sum(parameter.numel() for parameter in loaded.transformer.parameters())
    took = time.perf_counter() - started
    return [Finding("ok", "shipped model", f"{ModelConfig().path}, {size:,} parameters, loaded in {took:.1f} s")]


def ocr() -> list[Finding]:
    """Let the recogniser of the `ocr` reward read a clean number."""
    try:
        from digenrl.data.numbers import CLEAN, render
        from digenrl.rewards.ocr import Recogniser

        reading = Recogniser()(render([NUMBER], [CLEAN]))[0]
    except Exception as error:
        return [Finding("missing", "OCR reward", _reason(error), REINSTALL)]
    if reading != NUMBER:
        detail = f"read {reading!r} where {NUMBER!r} is drawn"
        return [
            Finding("missing", "OCR reward", detail, "pip install --force-reinstall rapidocr-onnxruntime onnxruntime")
        ]
    return [Finding("ok", "OCR reward", f"reads {NUMBER!r} where it is drawn")]


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
