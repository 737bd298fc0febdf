#!/usr/bin/env python3
"""The README's figure: the sheets that a run wrote before and after, side by side, with prompts and rewards.

    pip install pillow
    python scripts/figure.py runs/moving-shapes docs/figures/before_after.png
"""

import json
import sys
from pathlib import Path

from PIL import Image, ImageDraw

COLUMN, MARGIN = 190, 24


def shown(run: Path, when: str) -> list[dict]:
    """The samples of a sheet, in the order of its rows."""
    samples = json.loads((run / f"evaluation-{when}.json").read_text())["samples"]
    return [sample for sample in samples if sample["video"]]


def main(run: str, output: str) -> None:
    run = Path(run)
    sheets = {when: Image.open(run / "samples" / f"{when}.png") for when in ("before", "after")}
    rows = list(zip(shown(run, "before"), shown(run, "after")))
    width = COLUMN + sum(sheet.width for sheet in sheets.values()) + MARGIN
    height = sheets["before"].height
    figure = Image.new("RGB", (width, height + MARGIN), "white")
    draw = ImageDraw.Draw(figure)
    left = COLUMN
    for when, sheet in sheets.items():
        draw.text((left + 8, 6), when, fill="black")
        figure.paste(sheet, (left, MARGIN))
        left += sheet.width + MARGIN
    for row, (before, after) in enumerate(rows):
        top = MARGIN + height * (2 * row + 1) // (2 * len(rows)) - 14
        draw.text((6, top), before["text"], fill="black")
        draw.text((6, top + 14), f"reward {before['reward']['value']:.2f} to {after['reward']['value']:.2f}", fill="black")
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    figure.save(output, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
