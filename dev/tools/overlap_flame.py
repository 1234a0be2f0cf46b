"""Where a step's time goes, from the step through phases, functions and kinds of operations to units, as text and as a picture.
Widths are ms of a step: means of all ranks and of the steps that count.

The whole is computing + communication + waits for other ranks, as if nothing were hidden, so a step takes less by what is hidden.
Communication is as overlap_split.py has it, in the phase in which it was issued. Computing is as the timeline has it, with the time
in which a rank had no core.
"""
from overlap_split import Shares, name_by, unit_name
from timeline import PHASES
from tool import Picture

BAR = 40                                       # columns of text
LEFT, WIDTH, TOP, ROW, LETTER = 10, 880, 62, 22, 7  # pixels
COLOURS = (("#8ecae6", "computing"), ("#c1121f", "exposed communication"), ("#dddddd", "waiting for other ranks"),
           ("#7fb069", "hidden communication"))


class Frame(Shares):
    def __init__(self, name, order=0):
        super().__init__()
        self.name, self.order, self.children = name, order, {}

    ms = property(lambda self: self.computing + self.total + self.others)
    parts = property(lambda self: (self.computing, self.exposed, self.others, self.hidden))
    depth = property(lambda self: max((1 + f.depth for f in self.children.values()), default=0))
    sorted = property(lambda self: sorted(self.children.values(), key=lambda f: (f.order, -f.ms, f.name)))

    def add_along(self, way, shares):
        """Adds ms along the way, of (name, order), from this frame to a leaf."""
        self.add(shares)
        if way: self.children.setdefault(way[0][0], Frame(*way[0])).add_along(way[1:], shares)


def flame_of(split):
    root, trace = Frame("step"), split.trace
    for r in trace.ranks:
        for s in r.compute:
            if s.letter == "." or s.phase is None or s.step not in split.index: continue
            unit = [] if s.unit is None else [(unit_name(s.unit, s.unit), s.unit)]
            ms = 1e-3 * (s.end - s.begin) / len(split.numbers) / len(trace.ranks)
            root.add_along([(s.phase, PHASES.index(s.phase)), ("computing", -1), *unit], Shares(computing=ms))
    for o in split.operations:
        caller = o.caller or "function not known"
        root.add_along([(o.phase, PHASES.index(o.phase)), (caller, 0), name_by("kind", o), name_by("unit", o)], o.shares)
    trace.require(root.ms > 0, "has no time in the steps that count")
    return root


# ---- as text ----
def print_frame(f, whole, depth):
    computing, exposed, others, _ = f.parts
    columns = [(c + 0.5) * whole / BAR for c in range(int(BAR * f.ms / whole + 0.5))]
    bar = "".join("=" if at < computing else "#" if at < computing + exposed else "." if at < computing + exposed + others else "+"
                  for at in columns)
    print(f"{' ' * 2 * depth}{f.name:<{30 - 2 * depth}} {f.ms:9.3f} {100 * f.ms / whole:6.1f} % {exposed:9.3f} "
          f"{f.hidden:9.3f} {others:9.3f}  {bar}")
    for child in f.sorted: print_frame(child, whole, depth + 1)


def print_flame(root):
    print("\nms of a step, as if nothing were hidden: = computing, # exposed, . waiting for other ranks, + hidden communication")
    print(f"{'step > phase > function > ...':<30} {'ms':>9} {'':>8} {'exposed':>9} {'hidden':>9} {'waiting':>9}")
    print_frame(root, root.ms, 0)


# ---- as a picture ----
def draw_frame(picture, f, way, x, per_ms, whole, row):
    """way: "step > forward", which the text that a browser shows at the frame begins with."""
    parts, y, at, room = f.parts, TOP + row * ROW, x, int((f.ms * per_ms - 6) / LETTER)
    words = ", ".join(f"{word} {ms:.3f}" for word, ms in zip(("computing", "exposed", "waiting", "hidden"), parts))
    picture.add(f"<g><title>{way}: {f.ms:.3f} ms, {100 * f.ms / whole:.1f} %; {words}</title>")
    for (colour, _), ms in zip(COLOURS, parts):
        if ms * per_ms >= 0.01: picture.box(at, y, ms * per_ms, ROW - 1, colour)
        at += ms * per_ms
    picture.box(x, y, f.ms * per_ms, ROW - 1, "none", ' stroke="white"')
    name = f.name.removeprefix("block ") if len(f.name) > room else f.name  # its number says more than its first letters
    if room >= 5 or len(name) <= room:  # as much of it as there is room for
        picture.add(f'<text x="{x + 4:.2f}" y="{y + 15}" stroke="white" stroke-width="2" paint-order="stroke">'
                    f"{name[:max(room, 0)]}</text>")
    picture.add("</g>")
    for child in f.sorted:
        draw_frame(picture, child, f"{way} &gt; {child.name}", x, per_ms, whole, row + 1)
        x += child.ms * per_ms


def write_flame(path, split):
    root = flame_of(split)
    picture = Picture(2 * LEFT + WIDTH, TOP + (1 + root.depth) * ROW + 8)
    picture.add("<title>Where the time of a step goes, by phase, function, kind of operation and unit</title>")
    picture.add(f'<text x="{LEFT}" y="18" font-size="14">A step of {1e3 * split.mean["step"]:.2f} ms, mean of '
                f"{len(split.trace.ranks)} ranks; {root.ms:.2f} ms if nothing were hidden: by phase, function, kind and "
                "unit</text>")
    picture.legend(LEFT, 28, COLOURS)
    picture.add(f'<text x="{LEFT}" y="55">{split.efficiency_text()}</text>')
    draw_frame(picture, root, "step", LEFT, WIDTH / root.ms, root.ms, 0)
    picture.write("--flame-svg", path)
