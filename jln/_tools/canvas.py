"""A sheet to draw pictures on: measured in the pixels of the page that shows it, saved as an SVG, always the same."""

from __future__ import annotations

import io
import pathlib
import re
from collections.abc import Sequence
from typing import Any

WIDTH = 830  # of a page where a repository is browsed
MARGIN = 18
OURS, INK, SOFT, RULE, BAND = "#0f766e", "#1f2937", "#6b7280", "#d1d5db", "#f3f4f6"
GREYS = ("#6b7280", "#9ca3af", "#b4bac4", "#c8cdd5", "#d8dce2", "#e5e8ec")
_FONTS = "Helvetica, Arial, 'DejaVu Sans', sans-serif"
_POINTS = 0.75  # of a pixel: 96 of these are an inch, 72 of those


class Canvas:
    """A white card with round corners, which reads on a dark page as on a bright one. (0, 0) is its upper left corner.

    told: every text on it, in the order it was drawn.
    """

    def __init__(self, height: float):
        from matplotlib.figure import Figure

        self.told: list[str] = []
        self.boxes: list[tuple[float, float, float, float]] = []
        self.height = height
        self.figure = Figure(figsize=(WIDTH / 96, height / 96), dpi=96)
        self.figure.patch.set_alpha(0)
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, WIDTH), ylim=(height, 0))
        self.axes.set_axis_off()
        self.box(0.5, 0.5, WIDTH - 1, height - 1, "white", edge=RULE, radius=10)

    def box(
        self, x: float, y: float, width: float, height: float, face: str, *, edge: str = "none", radius: float = 0,
        line: float = 1,
    ) -> None:  # fmt: skip
        """Draw a rectangle. radius: of its corners."""
        from matplotlib.patches import FancyBboxPatch, Rectangle

        kind: dict[str, Any] = {"facecolor": face, "edgecolor": edge, "linewidth": line * _POINTS, "clip_on": False}
        kind["zorder"] = len(self.boxes) and 1  # the card is below the lines
        self.boxes.append((x, y, x + width, y + height))
        if radius:
            style = f"round,pad=0,rounding_size={min(radius, width / 2, height / 2)}"
            self.axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, **kind))
        else:
            self.axes.add_patch(Rectangle((x, y), width, height, **kind))

    def line(self, *points: tuple[float, float], colour: str = RULE, width: float = 1, dashed: bool = False) -> None:
        dashes = (3, 2) if dashed else (None, None)
        xs, ys = zip(*points, strict=True)
        self.axes.plot(xs, ys, color=colour, linewidth=width * _POINTS, dashes=dashes, zorder=0.9, clip_on=False)

    def arrow(self, start: tuple[float, float], end: tuple[float, float], width: float, colour: str) -> None:
        """Draw a horizontal arrow. width: of its shaft."""
        (x, y), (tip, _) = start, end
        head = (4 + width / 2) * (1 if tip > x else -1)
        half = width / 2
        outline = [
            (x, y - half), (tip - head, y - half), (tip - head, y - half - 3), (tip, y),
            (tip - head, y + half + 3), (tip - head, y + half), (x, y + half),
        ]  # fmt: skip
        from matplotlib.patches import Polygon

        self.axes.add_patch(Polygon(outline, closed=True, facecolor=colour, edgecolor="none", clip_on=False))

    def text(
        self, x: float, y: float, text: str, *, size: float = 11, colour: str = INK, bold: bool = False,
        align: str = "left", fixed: bool = False,
    ) -> None:  # fmt: skip
        """Write one line, whose middle is at the height `y`. fixed: in letters of one width, as code."""
        if not text:
            return
        self.told.append(text)
        self.axes.text(
            x, y, text, fontsize=size * _POINTS, color=colour, fontweight="bold" if bold else "normal",
            ha=align, va="center_baseline", family="DejaVu Sans Mono" if fixed else "DejaVu Sans", parse_math=False,
        )  # fmt: skip

    def width(self, text: str, *, size: float = 11, bold: bool = False) -> float:
        """Return how many pixels a text takes at most: where letters are set on whole pixels, a twentieth more."""
        from matplotlib.font_manager import FontProperties
        from matplotlib.textpath import TextToPath

        font = FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal", size=size)
        return 1.06 * TextToPath().get_text_width_height_descent(text, font, ismath=False)[0]

    def title(self, title: str, *lines: str) -> None:
        """Write what the picture shows, and lines that say how to read it."""
        self.text(MARGIN, 24, title, size=15, bold=True)
        for i, line in enumerate(lines):
            self.text(MARGIN, 44 + 15 * i, line, colour=SOFT)

    def collisions(self) -> list[str]:
        """Find texts that lie on one another, across the edge of a box, or beyond the card's."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        renderer = FigureCanvasAgg(self.figure).get_renderer()
        collisions, texts = [], []
        for text in self.axes.texts:
            box = text.get_window_extent(renderer)
            texts.append((text.get_text(), (box.x0, self.height - box.y1, box.x1, self.height - box.y0)))
        for i, (text, a) in enumerate(texts):
            collisions += [f"{text} | {other}" for other, b in texts[i + 1 :] if _overlap(a, b)]
            collisions += [f"{text} | a box" for b in self.boxes if _overlap(a, b) and not _within(a, b)]
            collisions += [f"{text} | the edge"] if not _within(a, (4, 4, WIDTH - 4, self.height - 4)) else []
        return collisions

    def save(self, path: pathlib.Path) -> None:
        """Write an SVG whose letters are the page's, and which has every text on it as its description."""
        import matplotlib

        path.parent.mkdir(parents=True, exist_ok=True)
        about: Any = {"Date": None, "Description": "; ".join(self.told)}
        drawn = io.StringIO()
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jln"}):
            self.figure.savefig(drawn, format="svg", metadata=about, transparent=True)
        # Letters are set by the first font that the page has, all of them narrower than the one that was measured; and
        # a third of the file would say nothing.
        text = drawn.getvalue().replace("'DejaVu Sans Mono'", "Menlo, Consolas, 'DejaVu Sans Mono', monospace")
        text = text.replace(" font-family: 'DejaVu Sans';", "")
        text = text.replace('<style type="text/css">', f'<style type="text/css">text{{font-family: {_FONTS}}} ')
        path.write_text(re.sub(r' transform="rotate\(-0 [^"]*\)"| *<!--.*?-->\n', "", text), encoding="utf-8")


def _overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    """Tell whether two boxes share more than an edge: x, y of the upper left corner, then of the lower right one."""
    return min(a[2], b[2]) - max(a[0], b[0]) > 0.5 and min(a[3], b[3]) - max(a[1], b[1]) > 1.5


def _within(a: Sequence[float], b: Sequence[float]) -> bool:
    return a[0] >= b[0] - 0.5 and a[1] >= b[1] - 1.5 and a[2] <= b[2] + 0.5 and a[3] <= b[3] + 1.5
