"""The timeline as a file: SVG written by hand, PNG by matplotlib.

Owns: both files. Does not own: the pieces and their colours (`timeline`).
"""

from pathlib import Path
from xml.sax.saxutils import escape

from shardtrain.errors import ConfigError
from shardtrain.strategies.schedules.timeline import LETTERS, Piece, Timeline

SUFFIXES = (".svg", ".png")

_ROW, _GAP, _LEFT, _TOP, _BOTTOM = 26, 4, 70, 34, 46
_WORDS = {"forward": "forward", "backward": "backward", "weight": "weight gradient"}


def save(timeline: Timeline, path: str | Path) -> None:
    """Write a timeline as a picture.

    Args:
        timeline: What to draw.
        path: The file; its ending, one of `SUFFIXES`, says what kind.

    Raises:
        ConfigError: Another ending, or matplotlib is not installed.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise ConfigError(
            "is no kind of picture that can be written",
            where=str(path),
            allowed=", ".join(SUFFIXES),
        )
    if suffix == ".svg":
        Path(path).write_text(svg(timeline), encoding="utf-8")
    else:
        _png(timeline, Path(path))


def _title(timeline: Timeline) -> str:
    return f"{timeline.name}: time {timeline.ticks[-1]:g} in {len(timeline.ticks) - 1} ticks"


def _label(timeline: Timeline, piece: Piece) -> str:
    virtual = f"{piece.virtual}." if timeline.num_virtual > 1 else ""
    return f"{virtual}{piece.micro}"


# -- SVG


def svg(timeline: Timeline) -> str:
    """Return a timeline as an SVG document.

    Args:
        timeline: What to draw; pieces show what they are when pointed at.
    """
    total = timeline.ticks[-1] or 1.0
    shortest = min((p.end - p.begin for p in timeline.pieces if p.end > p.begin), default=total)
    scale = min(max(12 * total / shortest, 600), 6000) / total
    width = _LEFT + total * scale + 20
    bottom = _TOP + timeline.num_stages * (_ROW + _GAP)
    height = bottom + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width:.0f}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(_title(timeline))}</text>',
    ]
    for stage in range(timeline.num_stages):
        y = _TOP + stage * (_ROW + _GAP)
        parts.append(f'<text x="8" y="{y + 17}">stage {stage}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{y}" width="{total * scale:.2f}" height="{_ROW}" '
            'fill="#eeeeee"/>'
        )
    for tick in timeline.ticks:
        x = _LEFT + tick * scale
        parts.append(
            f'<line x1="{x:.2f}" y1="{_TOP - 4}" x2="{x:.2f}" y2="{bottom}" stroke="#bbbbbb" '
            'stroke-width="0.6"/>'
        )
    parts += [_svg_piece(timeline, piece, scale) for piece in timeline.pieces]
    parts += _svg_legend(timeline, bottom + 16)
    return "\n".join([*parts, "</svg>", ""])


def _svg_piece(timeline: Timeline, piece: Piece, scale: float) -> str:
    x, y = _LEFT + piece.begin * scale, _TOP + piece.stage * (_ROW + _GAP)
    room = (piece.end - piece.begin) * scale
    words = f"{_WORDS[piece.part]} of microbatch {piece.micro}"
    if timeline.num_virtual > 1:
        words += f" on virtual stage {piece.virtual}"
    text = _label(timeline, piece)
    shown = ""
    if room >= 7 * len(text):
        shown = f'<text x="{x + room / 2:.2f}" y="{y + 17}" text-anchor="middle">{text}</text>'
    return (
        f"<g><title>{words}, {piece.begin:g} to {piece.end:g}</title>"
        f'<rect x="{x:.2f}" y="{y}" width="{room:.2f}" height="{_ROW}" '
        f'fill="{timeline.colour(piece.part, piece.virtual)}" stroke="#ffffff" '
        f'stroke-width="0.5"/>{shown}</g>'
    )


def _svg_legend(timeline: Timeline, y: int) -> list[str]:
    parts, x = [], float(_LEFT)
    for part in timeline.parts:
        for virtual in range(timeline.num_virtual):
            parts.append(
                f'<rect x="{x:.0f}" y="{y}" width="14" height="14" '
                f'fill="{timeline.colour(part, virtual)}"/>'
            )
            x += 16
        parts.append(f'<text x="{x + 4:.0f}" y="{y + 11}">{_WORDS[part]}</text>')
        x += 24 + 6.5 * len(_WORDS[part])
    return parts


# -- PNG


def _png(timeline: Timeline, path: Path) -> None:
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ConfigError(
            "a PNG needs matplotlib, which is not installed",
            where=str(path),
            cure='pip install "shardtrain[plots]", or write an .svg, which needs nothing',
        ) from error
    total = timeline.ticks[-1] or 1.0
    wide = min(max(len(timeline.ticks) / 3, 8), 40)
    figure = Figure(figsize=(wide, 1.2 + 0.34 * timeline.num_stages), layout="constrained")
    axes = figure.add_subplot()
    inch = wide / total
    for part in timeline.parts:
        for virtual in range(timeline.num_virtual):
            colour = timeline.colour(part, virtual)
            mine = [p for p in timeline.pieces if (p.part, p.virtual) == (part, virtual)]
            axes.barh(
                [piece.stage for piece in mine],
                [piece.end - piece.begin for piece in mine],
                left=[piece.begin for piece in mine],
                height=0.86,
                color=colour,
                edgecolor="white",
                linewidth=0.5,
            )
    for piece in timeline.pieces:
        text = _label(timeline, piece)
        if (piece.end - piece.begin) * inch > 0.09 * len(text):
            middle = (piece.begin + piece.end) / 2
            axes.text(middle, piece.stage, text, ha="center", va="center", fontsize=7)
    axes.set_yticks(range(timeline.num_stages), [f"stage {s}" for s in range(timeline.num_stages)])
    axes.set_ylim(timeline.num_stages - 0.5, -0.5)
    axes.set_xlim(0, total)
    axes.set_xlabel("time")
    axes.set_title(_title(timeline), fontsize=10)
    handles = [
        Patch(color=timeline.colour(part, 0), label=f"{LETTERS[part]} {_WORDS[part]}")
        for part in timeline.parts
    ]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)
