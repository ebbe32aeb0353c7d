"""Draws curves over the steps of runs as an SVG file."""

from collections.abc import Mapping
from dataclasses import dataclass
from xml.sax.saxutils import escape

HEAD = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 400" style="background:#fff; font:13px sans-serif">'


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Values by step; curves of one name have one entry in the legend."""

    name: str
    values: Mapping[int, float]
    color: str
    width: float = 1.8


def draw(curves: list[Curve], *, caption: str, mark: tuple[int, str] | None = None) -> str:
    """Returns the image; `mark` is a step at which a vertical line is drawn, and what it says."""
    last = max(max(curve.values) for curve in curves)
    every = [value for curve in curves for value in curve.values.values()]
    low, high = int(min(every)), max(every) + 0.3

    def at(step: float, loss: float) -> tuple[float, float]:
        return round(60 + 630 * step / last, 1), round(50 + 290 * (high - loss) / (high - low), 1)

    def line(points: list[tuple[float, float]], color: str = "#ddd", width: float = 1.0) -> str:
        path = " ".join(f"{x},{y}" for x, y in points)
        return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"/>'

    def text(words: object, *, x: float, y: float) -> str:
        return f'<text x="{x}" y="{y}" stroke="#fff" stroke-width="4" paint-order="stroke">{escape(str(words))}</text>'

    image = [HEAD, text(caption, x=60, y=28), text("step", x=360, y=384), text("loss", x=20, y=54)]
    for loss in range(low, int(high) + 1):
        image += [line([at(0, loss), at(last, loss)]), text(loss, x=36, y=at(0, loss)[1] + 4)]
    image += [text(step, x=at(step, low)[0] - 8, y=360) for step in range(0, last + 1, 20)]
    if mark is not None:
        step, words = mark
        image += [line([at(step, low), at(step, high)], "#d95f02"), text(words, x=at(step, low)[0] + 6, y=200)]
    for curve in curves:
        image.append(line([at(*point) for point in sorted(curve.values.items())], curve.color, curve.width))
    for index, curve in enumerate({curve.name: curve for curve in curves}.values()):
        image += [line([(440, 80 + 24 * index), (480, 80 + 24 * index)], curve.color, curve.width)]
        image += [text(curve.name, x=490, y=84 + 24 * index)]
    return "\n".join([*image, "</svg>\n"])
