"""A checkpoint, against its own pipeline: `digenrl doctor --model PATH`."""

from __future__ import annotations

from collections.abc import Iterator

from flows.checks.finding import Finding


def findings(path: str, family: str | None, dtype: str, device: str) -> Iterator[Finding]:
    """One line per check, as it is made: what was found, and what is allowed.

    Raises:
        ConfigError: the checkpoint cannot be loaded, or there is no such family.
    """
    from digenrl.config import LoraConfig, ModelConfig
    from digenrl.config.errors import ConfigError
    from digenrl.models.registry import family_of
    from digenrl.models.verify import family_in, smallest, verify

    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("--device cuda: torch sees no CUDA device here; write --device cpu")
    family = family_in(path) if family is None else family
    family_of(family)
    if dtype not in ("auto", "float32", "bfloat16"):
        raise ConfigError(f"--dtype {dtype}: write auto, float32 or bfloat16")
    config = ModelConfig.model_validate(
        {"family": family, "path": path, "dtype": dtype, **vars(smallest(family, path))}
    )
    for check in verify(config, LoraConfig(rank=8, alpha=16), device):
        bound = "at least" if check.at_least else "at most"
        numbers = f"{check.value:.3g}, {bound} {check.limit:.3g}"
        detail = f"{numbers}  ({check.detail})" if check.detail else numbers
        remedy = "" if check.passed else "do not train this checkpoint: what is trained would not be what is drawn"
        yield Finding("ok" if check.passed else "missing", check.name, detail, remedy)
