"""`digenrl sample`: draw pictures with a run's weights.

What is drawn depends on the weights, the seed and a prompt's text and position only, and the file's name on the same.
Noise is drawn as diffusers does from `torch.Generator().manual_seed(seed)`, one prompt after the other: the pipeline
with the run's LoRA and the same seed draws the same picture (WanPipeline a similar one: its solver is another).
"""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from digenrl.config.errors import ConfigError, encoding_problem
from digenrl.identity import EVAL_ITERATION, SampleId
from flows.errors import ExpectedError
from storage.atomic import write_atomically
from storage.home import home
from storage.runs import RunDirectory

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Characters of a prompt that go into a file's name.
LONGEST_SLUG = 40
#: The largest picture that is drawn: 200 MB of pixels, before they are compressed.
MOST_PIXELS = 2**26
#: A picture whose shorter side has fewer pixels than this is hard to see as it is.
SMALL_PIXELS = 64


def run(
    run_name: str, prompts: Sequence[str], *, seed: int, out: str | None = None, base: bool = False, scale: int = 1
) -> None:
    """Draw every prompt into a PNG file and print the paths.

    Args:
        run_name: the run.
        prompts: texts; each is drawn by itself, so that its picture does not depend on the others.
        seed: of the noise.
        out: the file to write, for a single prompt; None: below the run's directory.
        base: with the base model, not with the trained weights.
        scale: enlarge this many times, without smoothing.

    Raises:
        ConfigError: there is no such run, it has no weights, or the arguments do not go together.
        ExpectedError: a picture is not finite.
    """
    directory = RunDirectory.open(home(), run_name)
    config = directory.read_config()
    if not prompts:
        raise ConfigError("sample needs something to draw: --prompt TEXT, for the tiny presets a number such as 042")
    _check_prompts(prompts)
    _check_scale(config.model.height, config.model.width, scale)
    paths = [Path(out)] if out is not None else _paths(directory, prompts, seed, base, scale)
    if out is not None:
        _check_out(out, prompts)

    # After the checks: these take seconds.
    import torch

    from flows.inference import Inference
    from flows.prompt_notes import prompt_notes
    from flows.weights import newest_weights

    weights = None if base else newest_weights(directory, config)
    inference = Inference(config)
    for note in inference.notes + [note for prompt in prompts for note in prompt_notes(inference.policy.model, prompt)]:
        typer.echo(f"note: {note}", err=True)
    tag, adapter = ("base", inference.base) if weights is None else ("trained", weights.adapter)
    typer.echo(f"drawing with the {'base model' if weights is None else weights.label}", err=True)
    generator = torch.Generator().manual_seed(seed)
    for position, (prompt, path) in enumerate(zip(prompts, paths, strict=True)):
        sample = SampleId(seed, EVAL_ITERATION, position, 0)
        trajectory, images = inference.generate(tag, adapter, [sample], [prompt], inference.noise(generator))
        if not trajectory.finite.all():
            raise ExpectedError(f"prompt {prompt!r}: the model's picture holds values that are not finite")
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, png(images[0], scale))
        typer.echo(str(path))
    _hint(config.model.height, config.model.width, scale)


def png(frames: NDArray[np.uint8], scale: int) -> bytes:
    """A PNG file of the frames (F, H, W, 3), one after the other from left to right, enlarged `scale` times."""
    import numpy as np
    from PIL import Image

    image = Image.fromarray(np.concatenate(list(frames), axis=1))
    if scale > 1:
        image = image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def slug(prompt: str) -> str:
    """A prompt as part of a file's name: safe on any system. A name that lost something carries a hash."""
    joined = "-".join(prompt.split())
    if re.fullmatch(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{LONGEST_SLUG - 1}}}", joined):
        return joined
    legible = re.sub(r"[^A-Za-z0-9._-]+", "-", joined).strip("._-")[:LONGEST_SLUG].rstrip("._-")
    digest = hashlib.sha256(prompt.encode()).hexdigest()[:8]
    return f"{legible}-{digest}" if legible else digest


def _paths(directory: RunDirectory, prompts: Sequence[str], seed: int, base: bool, scale: int) -> list[Path]:
    """One file for each prompt. The position is part of the identity, and so of the name, except for the first."""
    ending = ("-base" if base else "") + (f"-x{scale}" if scale > 1 else "")
    names = [
        f"{slug(prompt)}-seed{seed}{f'-{position + 1}' if position else ''}{ending}.png"
        for position, prompt in enumerate(prompts)
    ]
    return [directory.path / "samples" / name for name in names]


def _check_prompts(prompts: Sequence[str]) -> None:
    for prompt in prompts:
        if problem := encoding_problem(prompt):
            raise ConfigError(f"--prompt {prompt!r} holds {problem}")


def _check_scale(height: int, width: int, scale: int) -> None:
    if scale > 1 and height * width * scale**2 > MOST_PIXELS:
        most = max(1, math.isqrt(MOST_PIXELS // (height * width)))
        raise ConfigError(
            f"--scale {scale} makes {width * scale} x {height * scale} pixels of {width} x {height}; use at most {most}"
        )


def _check_out(out: str, prompts: Sequence[str]) -> None:
    path = Path(out)
    if len(prompts) > 1:
        raise ConfigError(f"--out {out} names one file, but there are {len(prompts)} prompts; leave --out away")
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--out {out}: expected the name of a .png file")
    if path.is_dir() or not path.parent.is_dir():
        what = "it is a directory" if path.is_dir() else f"there is no directory {path.parent}"
        raise ConfigError(f"--out {out}: {what}")


def _hint(height: int, width: int, scale: int) -> None:
    if scale * min(height, width) < SMALL_PIXELS:
        enough = -(-SMALL_PIXELS // min(height, width))
        typer.echo(f"note: {width * scale} x {height * scale} pixels; --scale {enough} makes it larger", err=True)
