"""Pictures as SVG: of rectangles, lines and words, for tables, experiments and tools."""
from html import escape


def tick_of(length, n):
    """1, 2 or 5 times a power of ten, so that there are about n of them in the length."""
    tick = next(10.0 ** k for k in range(-9, 19) if length / 10.0 ** k <= 2.5 * n)
    if length / tick > 1.5 * n: tick *= 2
    return tick * 2.5 if length / tick > 1.5 * n else tick


class Svg:
    digits = 1 # after the point of a length that is no whole number

    def __init__(self, width, height):
        self.parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
                      'font-family="sans-serif" font-size="12">', '<rect width="100%" height="100%" fill="white"/>']

    def __str__(self):
        return "\n".join([*self.parts, "</svg>\n"])

    def add(self, tag, content=None, more="", **attributes):
        """An element, for example a line; x_1 is the attribute x-1. more: further attributes as text."""
        names = "".join(f' {name.replace("_", "-")}="{f"{x:.{self.digits}f}" if isinstance(x, float) else x}"' for name,
                        x in attributes.items()) + more
        self.parts.append(f"<{tag}{names}/>" if content is None else f"<{tag}{names}>{escape(str(content), quote=False)}</{tag}>")

    def rect(self, x, y, width, height, colour, **more):
        self.add("rect", x=x, y=y, width=width, height=height, fill=colour, **more)

    def text(self, x, y, text, anchor=None, **more):
        self.add("text", text, x=x, y=y, **({"text_anchor": anchor} if anchor else {}), **more)

    def line(self, x1, y1, x2, y2, stroke, **more):
        self.add("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=stroke, **more)

    def curve(self, points, colour, dashed=False):
        if points:
            self.add("polyline", points="".join(f"{x:.1f},{y:.1f} " for x, y in points), fill="none", stroke=colour, stroke_width=2,
                     **({"stroke_dasharray": "5 4"} if dashed else {}))


class Panels:
    """Panels with curves in two columns; all have values from bottom to ceiling."""
    WIDE, HIGH = 260, 230

    def __init__(self, head, panels, bottom, ceiling):
        self.svg, self.bottom, self.ceiling, self.panels = Svg(1080, 60 + 320 * ((panels + 1) // 2)), bottom, ceiling, 0
        self.svg.text(20, 22, head, font_size=14)

    def y(self, loss): return self.top + (self.ceiling - loss) * self.HIGH / (self.ceiling - self.bottom)

    def clipped(self, points, longest):
        """The part of a curve that is below the ceiling, in the picture's units."""
        placed = []
        for i, (x, y) in enumerate(points):
            for before in [points[i - 1]] if i else []:
                if (before[1] > self.ceiling) != (y > self.ceiling):
                    placed.append((before[0] + (x - before[0]) * (self.ceiling - before[1]) / (y - before[1]), self.ceiling))
            if y <= self.ceiling: placed.append((x, y))
        return [(self.left + x * self.WIDE / longest, self.y(y)) for x, y in placed]

    def add(self, title, unit, longest, curves):
        """Curves have points, the value at their end, a colour and a label, and may win or be dashed. The lowest is on top, and
        first in the list beside the panel."""
        svg, self.left, self.top = self.svg, 50 + self.panels % 2 * 525, 60 + self.panels // 2 * 320
        self.panels += 1
        self.frame(title, unit, longest)
        curves = sorted(curves, key=lambda curve: curve.end)
        for curve in reversed(curves): svg.curve(self.clipped(curve.points, longest), curve.colour, curve.dashed)
        for i, curve in enumerate(curves):
            x, y = self.left + self.WIDE + 10, self.top + 8 + 18 * i
            svg.line(x, y - 4, x + 18, y - 4, curve.colour, stroke_width=3, **({"stroke_dasharray": "5 4"} if curve.dashed else {}))
            svg.text(x + 24, y, curve.label, **({"font_weight": "bold"} if curve.wins else {}))

    def frame(self, title, unit, longest):
        svg, left, top, height = self.svg, self.left, self.top, self.ceiling - self.bottom
        svg.text(left, top - 12, title, font_size=14, font_weight="bold")
        tick = 0.2 if height > 0.8 else 0.1 if height > 0.3 else 0.02
        for i in range(int(self.bottom / tick + 1), int(self.ceiling / tick) + 1):
            svg.line(left, self.y(i * tick), left + self.WIDE, self.y(i * tick), "#dddddd")
            svg.text(left - 6, self.y(i * tick) + 4, f"{i * tick:.1f}", "end")
        tick = tick_of(longest, 5)
        for i in range(int(longest * 1.0001 / tick) + 1):
            x = left + i * tick * self.WIDE / longest
            svg.line(x, top, x, top + self.HIGH, "#eeeeee")
            svg.text(x, top + self.HIGH + 16, f"{i * tick:g}", "middle")
        svg.text(left + self.WIDE, top + self.HIGH + 32, unit, "end")


def bars(title, rows, mark=None):
    """Horizontal bars: rows of (label, value, text); mark: a value at which a line stands, and its text."""
    left, width, row = 230, 350, 26
    most = max([value for _, value, _ in rows] + ([mark[0]] if mark else [])) or 1
    svg, bottom = Svg(700, 44 + row * len(rows) + (18 if mark else 6)), 34 + row * len(rows)
    svg.text(10, 20, title, font_weight="bold")
    for i, (label, value, text) in enumerate(rows):
        y = 34 + row * i
        svg.text(left - 8, y + 14, label, "end")
        svg.rect(left, y, width * value / most, 18, "#3a86b7")
        svg.text(left + width * value / most + 5, y + 14, text)
    if mark:
        x = left + width * mark[0] / most
        svg.add("path", d=f"M {x:.1f} 30 V {bottom}", stroke="#c1121f", stroke_dasharray="4 3", fill="none")
        svg.text(x, bottom + 13, mark[1], "middle", fill="#c1121f")
    return str(svg)
