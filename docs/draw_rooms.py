"""Draw the rooms of the package and who imports whom, from the code itself, into assets/rooms.svg.

Rooms stand on the levels that the contract in pyproject.toml gives them. Dark arrows are imports that no chain of
others implies; pale ones are the rest.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "docs/assets/rooms.svg"
PACKAGE = "neuron_merging"
WIDTH, HEIGHT = 112, 30
ACROSS, DOWN = 168, 62
SIDE, MARGIN = 100, 24
BOW = 26, 150
"""How far an arrow swings out for each level that it passes, and at most."""
Edge = tuple[str, str]


def levels() -> list[list[str]]:
    """The rooms from the top down, as the contract has them."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (rooms,) = (contract["layers"] for contract in contracts if contract.get("containers") == [PACKAGE])
    return [level.replace("|", ":").replace(" ", "").split(":") for level in rooms]


def imports() -> set[Edge]:
    """Pairs of rooms: the first imports something of the second."""
    graph = grimp.build_graph(PACKAGE)
    found = {
        (_room(module), _room(other))
        for module in graph.modules
        for other in graph.find_modules_directly_imported_by(module)
    }
    known = {room for level in levels() for room in level}
    return {(a, b) for a, b in found if a != b and {a, b} <= known}


def _room(module: str) -> str:
    return [*module.split("."), ""][1]


def upward(edges: Iterable[Edge]) -> list[Edge]:
    """Imports of a room above."""
    depth = {room: i for i, rooms in enumerate(levels()) for room in rooms}
    return sorted((a, b) for a, b in edges if depth[a] > depth[b])


def essential(edges: set[Edge]) -> set[Edge]:
    """Without what a longer chain of imports says as well."""
    below: dict[str, set[str]] = {}
    for room in (room for level in reversed(levels()) for room in level):
        direct = {b for a, b in edges if a == room}
        below[room] = direct.union(*(below.get(other, set()) for other in direct))
    return {(a, b) for a, b in edges if not any(b in below[other] for x, other in edges if x == a and other != b)}


def drawing() -> str:
    """The picture as SVG."""
    edges = imports()
    wrong = upward(edges)
    assert not wrong, f"upward imports: {wrong}"
    places, strong = _places(), essential(edges)
    wide, high = SIDE * 2 + WIDTH + 2 * ACROSS, MARGIN * 2 + HEIGHT + DOWN * (len(levels()) - 1)
    arrows = [_arrow(places, edge, edge in strong) for edge in sorted(edges, key=lambda e: (e in strong, e))]
    boxes = [_box(room, *place) for room, place in places.items()]
    return "\n".join([*_head(wide, high), *arrows, *boxes, "</svg>", ""])


def _places() -> dict[str, tuple[int, int]]:
    """The middle of each room's box. Levels with one room swing from side to side, so that arrows pass by."""
    found: dict[str, tuple[int, int]] = {}
    middle = SIDE + WIDTH // 2 + ACROSS
    for depth, rooms in enumerate(levels()):
        y = MARGIN + HEIGHT // 2 + DOWN * depth
        for i, room in enumerate(rooms):
            x = middle + round((i - (len(rooms) - 1) / 2) * ACROSS) if len(rooms) > 1 else middle + _swing(depth)
            found[room] = (x, y)
    return found


def _swing(depth: int) -> int:
    return (0, ACROSS // 3, -ACROSS // 3)[depth % 3]


def _arrow(places: Mapping[str, tuple[int, int]], edge: Edge, strong: bool) -> str:
    (x, y), (u, v) = places[edge[0]], places[edge[1]]
    kind = "strong" if strong else "weak"
    if y == v:
        side = WIDTH // 2 if x < u else -WIDTH // 2
        return f'<path class="{kind}" d="M {x + side} {y} L {u - side} {v}"/>'
    start, end = y + HEIGHT // 2, v - HEIGHT // 2
    passed = (v - y) // DOWN - 1
    side = 1 if x + u >= 2 * (SIDE + WIDTH // 2 + ACROSS) else -1
    bow = side * min(BOW[0] * (passed + 1), BOW[1]) if passed else 0
    third = (end - start) / 3
    return (
        f'<path class="{kind}" d="M {x} {start} C {x + bow} {start + third:.0f} '
        f'{u + bow} {end - third:.0f} {u} {end}"/>'
    )


def _box(room: str, x: int, y: int) -> str:
    left, top = x - WIDTH // 2, y - HEIGHT // 2
    name = f"{room}/" if (ROOT / "src" / PACKAGE / room).is_dir() else f"{room}.py"
    return (
        f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" rx="5"/>'
        f'<text x="{x}" y="{y + 5}">{escape(name)}</text>'
    )


def _head(wide: int, high: int) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}">',
        "<title>The rooms of neuron_merging and their imports; every arrow points down</title>",
        "<style>",
        "rect { fill: #eef1fb; stroke: #3f51b5; }",
        "text { font: 14px monospace; text-anchor: middle; fill: #1a237e; }",
        "path { fill: none; }",
        ".strong { stroke: #3f51b5; stroke-width: 1.6; marker-end: url(#strong); }",
        ".weak { stroke: #c5cae9; marker-end: url(#weak); }",
        "</style>",
        "<defs>",
        *(
            f'<marker id="{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M 0 0 L 8 4 L 0 8 z" style="fill: {colour}"/></marker>'
            for kind, colour in (("strong", "#3f51b5"), ("weak", "#c5cae9"))
        ),
        "</defs>",
        f'<rect width="{wide}" height="{high}" style="fill: #fff; stroke: none"/>',
    ]


if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(drawing(), encoding="utf-8")
    print(f"{TARGET.relative_to(ROOT)}: {len(imports())} imports between {sum(map(len, levels()))} rooms, none upward")
