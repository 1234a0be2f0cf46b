"""The two pictures of compress_table.py: the loss over simulated time, a panel for each rate, the winner on top of its list; and
the loss over steps with and without error feedback, a panel for each method."""
from svg import Svg, tick_of

COLOURS = {"none": "#000000", "bf16": "#8a8a8a", "fp16": "#bbbbbb", "int8": "#3a86b7", "int4": "#17a398", "top-k": "#f08c00",
           "sign": "#c1121f",
           "onebit-adam": "#7b2cbf", "powersgd": "#5a9a2f"}
WIDE, HIGH = 260, 230


def base(variant): return variant.split("@")[0].removesuffix("-ef")


class Curve:
    def __init__(self, variant, points, end, note="", wins=False, dashed=False):
        self.points, self.end, self.wins, self.dashed = points, end, wins, dashed
        self.colour = COLOURS.get(base(variant), "#555555")
        self.label = f"{variant.replace('-ef', ', feedback', 1)} {end:.2f}{note}"


class Picture:
    """Panels in two columns, with losses from bottom to ceiling."""

    def __init__(self, head, panels, bottom, ceiling):
        self.svg, self.bottom, self.ceiling, self.panels = Svg(1080, 60 + 320 * ((panels + 1) // 2)), bottom, ceiling, 0
        self.svg.text(20, 22, head, font_size=14)

    def y(self, loss): return self.top + (self.ceiling - loss) * HIGH / (self.ceiling - self.bottom)

    def clipped(self, points, longest):
        """The part of a curve that is below the ceiling, in the picture's units."""
        placed = []
        for i, (x, y) in enumerate(points):
            for before in [points[i - 1]] if i else []:
                if (before[1] > self.ceiling) != (y > self.ceiling):
                    placed.append((before[0] + (x - before[0]) * (self.ceiling - before[1]) / (y - before[1]), self.ceiling))
            if y <= self.ceiling: placed.append((x, y))
        return [(self.left + x * WIDE / longest, self.y(y)) for x, y in placed]

    def panel(self, title, unit, longest, curves):
        """The lowest curve is on top, and first in the list beside the panel."""
        svg, self.left, self.top = self.svg, 50 + self.panels % 2 * 525, 60 + self.panels // 2 * 320
        self.panels += 1
        self.frame(title, unit, longest)
        curves = sorted(curves, key=lambda curve: curve.end)
        for curve in reversed(curves): svg.curve(self.clipped(curve.points, longest), curve.colour, curve.dashed)
        for i, curve in enumerate(curves):
            x, y = self.left + WIDE + 10, self.top + 8 + 18 * i
            svg.line(x, y - 4, x + 18, y - 4, curve.colour, stroke_width=3, **({"stroke_dasharray": "5 4"} if curve.dashed else {}))
            svg.text(x + 24, y, curve.label, **({"font_weight": "bold"} if curve.wins else {}))

    def frame(self, title, unit, longest):
        svg, left, top, height = self.svg, self.left, self.top, self.ceiling - self.bottom
        svg.text(left, top - 12, title, font_size=14, font_weight="bold")
        tick = 0.2 if height > 0.8 else 0.1 if height > 0.3 else 0.02
        for i in range(int(self.bottom / tick + 1), int(self.ceiling / tick) + 1):
            svg.line(left, self.y(i * tick), left + WIDE, self.y(i * tick), "#dddddd")
            svg.text(left - 6, self.y(i * tick) + 4, f"{i * tick:.1f}", "end")
        tick = tick_of(longest, 5)
        for i in range(int(longest * 1.0001 / tick) + 1):
            x = left + i * tick * WIDE / longest
            svg.line(x, top, x, top + HIGH, "#eeeeee")
            svg.text(x, top + HIGH + 16, f"{i * tick:g}", "middle")
        svg.text(left + WIDE, top + HIGH + 32, unit, "end")


def time(f, name):
    """Each method with or without error feedback, as has the lower loss after equal steps; not fp16 beside bf16."""
    # unit: seconds of computing
    unit, shown, has_bf16 = f["rows"][0]["compute"] / 1000, {}, any(r["variant"] == "bf16" for r in f["rows"])
    for r in f["rows"]:
        if base(r["variant"]) == "fp16" and has_bf16: continue
        if base(r["variant"]) not in shown or r["loss"][0] < shown[base(r["variant"])]["loss"][0]: shown[base(r["variant"])] = r
    names = [r["variant"] for r in shown.values()]
    bottom = min(end["loss"][0] for rate in f["rates"] for end in rate["ends"]) - 0.05
    picture = Picture(f"validation loss over simulated time, {name}: computing as measured + bytes / rate", len(f["rates"]), bottom,
                      bottom + 1.25)
    for rate in f["rates"]:
        curves = [Curve(end["variant"], [(x / unit, y) for x, y in end["points"]], end["loss"][0], f" ({end['steps']})",
                        end["best"])
                  for end in rate["ends"] if end["variant"] in names]
        picture.panel(f"{rate['rate']:g} Gb/s", "simulated time, in steps of pure computing", rate["seconds"] / unit, curves)
        picture.svg.text(picture.left + WIDE + 10, picture.top - 12, "loss at the end (steps)")
    return str(picture.svg)


def feedback(f, name):
    names = [r["variant"] for r in f["rows"]]
    methods = [base(v) for v in names if "-ef" in v and base(v) in names]
    curves = {r["variant"]: Curve(r["variant"], r["curve"], r["curve"][-1][1], dashed="-ef" in r["variant"]) for r in f["rows"]}
    ends = [curve.end for curve in curves.values()]
    picture = Picture(f"validation loss over steps with (dashed) and without error feedback, {name}", len(methods),
                      min(ends) - 0.05, max(ends) + 0.3)
    for method in methods:
        picture.panel(method, "steps", curves["none"].points[-1][0], [
            curves[v] for v in names if v == "none" or base(v) == method or method == "sign" and v == "onebit-adam"])
    return str(picture.svg)
