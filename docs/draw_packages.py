"""Draw the packages and their imports, read from the code, into assets/packages.svg.

The import contract in pyproject.toml gives the levels. Arrows are the transitive reduction of the imports: an import
that a chain of others implies is left out.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "docs/assets/packages.svg"
PACKAGE = "neuron_merging"
WIDTH, HEIGHT = 128, 30
ACROSS, DOWN = 168, 54
SIDE, MARGIN = 100, 24
BOW = 26, 150
"""Sideways bend of an arrow for each level that it passes, and the largest bend."""
Edge = tuple[str, str]


def read_levels() -> list[list[str]]:
    """The packages from the top down, in the order of the import contract."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (packages,) = (contract["layers"] for contract in contracts if contract.get("containers") == [PACKAGE])
    return [level.replace("|", ":").replace(" ", "").split(":") for level in packages]


def find_imports() -> set[Edge]:
    """Pairs of packages of which the first imports the second."""
    graph = grimp.build_graph(PACKAGE)
    found = {
        (_package_of(module), _package_of(other))
        for module in graph.modules
        for other in graph.find_modules_directly_imported_by(module)
    }
    known = {package for level in read_levels() for package in level}
    return {(a, b) for a, b in found if a != b and {a, b} <= known}


def _package_of(module: str) -> str:
    return [*module.split("."), ""][1]


def find_upward_imports(edges: Iterable[Edge]) -> list[Edge]:
    """Imports that break the contract: they point at a package above."""
    depth = {package: i for i, packages in enumerate(read_levels()) for package in packages}
    return sorted((a, b) for a, b in edges if depth[a] > depth[b])


def reduce_transitively(edges: set[Edge]) -> set[Edge]:
    """The imports without those that a longer chain of imports implies."""
    below: dict[str, set[str]] = {}
    for package in (package for level in reversed(read_levels()) for package in level):
        direct = {b for a, b in edges if a == package}
        below[package] = direct.union(*(below.get(other, set()) for other in direct))
    return {(a, b) for a, b in edges if not any(b in below[other] for x, other in edges if x == a and other != b)}


def draw_svg() -> str:
    """The drawing as SVG text."""
    edges = find_imports()
    wrong = find_upward_imports(edges)
    assert not wrong, f"upward imports: {wrong}"
    places = _place_boxes()
    wide, high = SIDE * 2 + WIDTH + 2 * ACROSS, MARGIN * 2 + HEIGHT + DOWN * (len(read_levels()) - 1)
    arrows = [_draw_arrow(places, edge) for edge in sorted(reduce_transitively(edges))]
    boxes = [_draw_box(package, *place) for package, place in places.items()]
    return "\n".join([*_write_head(wide, high), *arrows, *boxes, "</svg>", ""])


def _place_boxes() -> dict[str, tuple[int, int]]:
    """The centre of each box. Levels with one package alternate sideways, so that arrows have space to pass."""
    found: dict[str, tuple[int, int]] = {}
    middle = SIDE + WIDTH // 2 + ACROSS
    for depth, packages in enumerate(read_levels()):
        y = MARGIN + HEIGHT // 2 + DOWN * depth
        for i, package in enumerate(packages):
            x = (
                middle + round((i - (len(packages) - 1) / 2) * ACROSS)
                if len(packages) > 1
                else middle + _offset_level(depth)
            )
            found[package] = (x, y)
    return found


def _offset_level(depth: int) -> int:
    return (0, ACROSS // 3, -ACROSS // 3)[depth % 3]


def _draw_arrow(places: Mapping[str, tuple[int, int]], edge: Edge) -> str:
    (x, y), (u, v) = places[edge[0]], places[edge[1]]
    if y == v:
        side = WIDTH // 2 if x < u else -WIDTH // 2
        return f'<path d="M {x + side} {y} L {u - side} {v}"/>'
    start, end = y + HEIGHT // 2, v - HEIGHT // 2
    passed = (v - y) // DOWN - 1
    side = 1 if x + u >= 2 * (SIDE + WIDTH // 2 + ACROSS) else -1
    bow = side * min(BOW[0] * (passed + 1), BOW[1]) if passed else 0
    third = (end - start) / 3
    return f'<path d="M {x} {start} C {x + bow} {start + third:.0f} {u + bow} {end - third:.0f} {u} {end}"/>'


def _draw_box(package: str, x: int, y: int) -> str:
    left, top = x - WIDTH // 2, y - HEIGHT // 2
    name = f"{package}/" if (ROOT / "src" / PACKAGE / package).is_dir() else f"{package}.py"
    return (
        f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" rx="5"/>'
        f'<text x="{x}" y="{y + 5}">{escape(name)}</text>'
    )


def _write_head(wide: int, high: int) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}">',
        "<title>The packages of neuron_merging and their imports; every arrow points down</title>",
        "<style>",
        "rect { fill: #eef1fb; stroke: #3f51b5; }",
        "text { font: 14px monospace; text-anchor: middle; fill: #1a237e; }",
        "path { fill: none; stroke: #3f51b5; stroke-width: 1.6; marker-end: url(#tip); }",
        "</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M 0 0 L 8 4 L 0 8 z" style="fill: #3f51b5; stroke: none"/></marker></defs>',
        f'<rect width="{wide}" height="{high}" style="fill: #fff; stroke: none"/>',
    ]


if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(draw_svg(), encoding="utf-8")
    counted = f"{len(find_imports())} imports between {sum(map(len, read_levels()))} packages, none upward"
    print(f"{TARGET.relative_to(ROOT)}: {counted}")
