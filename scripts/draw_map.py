"""Draws docs/images/map.svg: the packages, the layers that their imports form, and the doors beside them.

    python scripts/draw_map.py            writes the file
    python scripts/draw_map.py --check    exit code 1 if the packages, layers or arrows in the file are not today's

A package is above all that it imports; hf.py of a family is of hub. Arrows follow from no others; numbers are lines.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, MAP = ROOT / "torchtitan_clone", ROOT / "docs/images/map.svg"
DOORS = ("cpu", "planner", "tools", "torchft", "commands", "api")
WIDTH, ROW, BOX, GAP, HEIGHT = 1000, 74, 104, 12, 40


def package_of(name: str) -> str:
    """Returns the package or file of torchtitan_clone that a dotted name is in; "" for others."""
    return name.split(".")[1] if name.startswith(f"{PACKAGE.name}.") else ""


def read_imports() -> dict[str, set[str]]:
    """Returns what each package imports of the others."""
    imports: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        package = "hub" if path.name == "hf.py" else path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())) if package not in ("__init__", "__main__") else ():
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                is_root = node.module == PACKAGE.name
                names = [f"{PACKAGE.name}.{alias.name}" for alias in node.names] if is_root else [node.module or ""]
            imports.setdefault(package, set()).update(map(package_of, names))
    return {name: (others & imports.keys()) - {name} for name, others in imports.items()}


def reachable(name: str, imports: dict[str, set[str]]) -> set[str]:
    """Returns all that a package imports, also through others."""
    return set().union(*({other} | reachable(other, imports) for other in imports[name]))


def draw(imports: dict[str, set[str]]) -> str:
    """Returns the drawing."""
    core = {name: others for name, others in imports.items() if name not in DOORS}
    level = dict.fromkeys(core, 0)
    for _ in core:
        level = {name: 1 + max((level[other] for other in others), default=-1) for name, others in core.items()}
    rows = [sorted(name for name in core if level[name] == each) for each in range(max(level.values()), -1, -1)]
    place = {}
    for y, names in enumerate(rows):
        left = (WIDTH - 150 - len(names) * (BOX + GAP)) / 2
        place |= {name: (left + x * (BOX + GAP), 20 + y * ROW) for x, name in enumerate(names)}
    place |= {name: (WIDTH - BOX - 10, 20 + ROW * (1 + y)) for y, name in enumerate(DOORS)}
    shapes = []
    for name, others in sorted(core.items()):
        for other in sorted(others - set().union(*(reachable(each, core) for each in others))):
            (x, y), (to_x, to_y) = place[name], place[other]
            line = f'x1="{x + BOX / 2:.0f}" y1="{y + HEIGHT}" x2="{to_x + BOX / 2:.0f}" y2="{to_y:.0f}"'
            shapes.append(f'<line {line} stroke="#9ab" marker-end="url(#a)"><title>{name} to {other}</title></line>')
    for name, (x, y) in place.items():
        files = [PACKAGE / f"{name}.py"] if (PACKAGE / f"{name}.py").exists() else (PACKAGE / name).rglob("*.*")
        lines = sum(len(f.read_bytes().splitlines()) for f in files if f.suffix in (".py", ".cpp", ".h"))
        style = 'fill="#fff" stroke="#c63" stroke-dasharray="5 3"' if name in DOORS else 'fill="#eef4fb" stroke="#468"'
        shapes.append(f'<rect x="{x:.0f}" y="{y}" width="{BOX}" height="{HEIGHT}" rx="5" {style}/>')
        for text, below, size in ((name, 17, 13), (f"{lines:,}", 33, 11)):
            shapes.append(f'<text x="{x + BOX / 2:.0f}" y="{y + below}" font-size="{size}">{text}</text>')
    arrow = '<marker id="a" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    box = f'viewBox="0 0 {WIDTH} {20 + ROW * len(rows)}" text-anchor="middle" font-family="sans-serif"'
    arrow += '<path d="M0 0 8 4 0 8z" fill="#9ab"/></marker>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box}>'
    return "\n".join([head, f"<defs>{arrow}</defs>", *shapes, "</svg>", ""])


if __name__ == "__main__":
    before, now = MAP.read_text() if MAP.exists() else "", draw(read_imports())
    if "--check" in sys.argv:
        sys.exit(re.sub(r">[\d,]+<", "><", before) != re.sub(r">[\d,]+<", "><", now))
    MAP.write_text(now)
