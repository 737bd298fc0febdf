#!/usr/bin/env python3
"""The README's figure: the sheets that a run wrote before and after, side by side.

    pip install pillow
    python scripts/figure.py runs/moving-shapes docs/figures/before_after.png
"""

import sys
from pathlib import Path

from PIL import Image, ImageDraw

MARGIN = 24


def main(run: str, output: str) -> None:
    sheets = [(name, Image.open(Path(run, "samples", f"{name}.png"))) for name in ("before", "after")]
    width = sum(sheet.width for _, sheet in sheets) + MARGIN
    figure = Image.new("RGB", (width, sheets[0][1].height + MARGIN), "white")
    draw = ImageDraw.Draw(figure)
    left = 0
    for name, sheet in sheets:
        draw.text((left + 8, 6), name, fill="black")
        figure.paste(sheet, (left, MARGIN))
        left += sheet.width + MARGIN
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    figure.save(output, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
