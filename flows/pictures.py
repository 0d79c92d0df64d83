"""Pictures a person looks at: sample grids and the learning curve."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from PIL import Image, ImageDraw, ImageFont

_MARGIN = 4
_TITLE = 22
_GROUND = (246, 246, 248)
_INK = (30, 30, 40)

#: Shorter side to which small samples are enlarged, without smoothing: a 12 pixel picture is unreadable as it is.
_LEGIBLE = 48


def montage(pictures: Mapping[int, bytes], captions: Mapping[int, str], columns: int = 8) -> Image.Image:
    """A grid of samples with a caption under each.

    Args:
        pictures: PNG files by prompt index; shown in that order.
        captions: text by prompt index.
        columns: pictures per row.
    """
    tiles = {index: _legible(Image.open(io.BytesIO(data)).convert("RGB")) for index, data in sorted(pictures.items())}
    width = max(tile.width for tile in tiles.values()) + _MARGIN
    height = max(tile.height for tile in tiles.values()) + 16 + _MARGIN
    columns = min(columns, len(tiles))
    rows = -(-len(tiles) // columns)
    sheet = Image.new("RGB", (columns * width + _MARGIN, rows * height + _MARGIN), _GROUND)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    for place, (index, tile) in enumerate(tiles.items()):
        row, column = divmod(place, columns)
        x, y = _MARGIN + column * width, _MARGIN + row * height
        sheet.paste(tile, (x, y))
        draw.text((x, y + tile.height), captions.get(index, "")[: tile.width // 6], fill=_INK, font=font)
    return sheet


def side_by_side(images: Sequence[Image.Image], titles: Sequence[str]) -> Image.Image:
    """Images next to each other, each under its title."""
    gap = 16
    width = sum(image.width for image in images) + gap * (len(images) - 1)
    sheet = Image.new("RGB", (width, max(image.height for image in images) + _TITLE), _GROUND)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(14)
    x = 0
    for image, title in zip(images, titles, strict=True):
        draw.text((x + _MARGIN, 3), title, fill=_INK, font=font)
        sheet.paste(image, (x, _TITLE))
        x += image.width + gap
    return sheet


def learning_curve(
    rewards: Sequence[tuple[int, float, float]], held_out: Sequence[tuple[int, float, float, float]]
) -> bytes:
    """PNG of the reward over iterations.

    Args:
        rewards: (iteration, mean, standard deviation) of the training samples.
        held_out: (iterations trained, mean, low, high) of the evaluations, with the 95 % interval.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if rewards:
        x, mean, std = zip(*rewards, strict=True)
        axes.fill_between(
            x,
            [m - s for m, s in zip(mean, std, strict=True)],
            [m + s for m, s in zip(mean, std, strict=True)],
            color="#4c78a8",
            alpha=0.15,
            linewidth=0,
        )
        axes.plot(x, mean, color="#4c78a8", linewidth=1, label="training samples, mean ± std")
    if held_out:
        x, mean, low, high = zip(*held_out, strict=True)
        below = [m - bound for m, bound in zip(mean, low, strict=True)]
        above = [bound - m for m, bound in zip(mean, high, strict=True)]
        axes.errorbar(
            x,
            mean,
            yerr=[below, above],
            color="#e45756",
            marker="o",
            capsize=3,
            label="held-out prompts, 95 % interval",
        )
    axes.set_xlabel("iteration")
    axes.set_ylabel("reward")
    axes.grid(alpha=0.3)
    if rewards or held_out:
        axes.legend(frameon=False, loc="best")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _legible(picture: Image.Image) -> Image.Image:
    factor = -(-_LEGIBLE // min(picture.size))
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
