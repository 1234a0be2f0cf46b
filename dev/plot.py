"""plot.py - plots the loss over the steps of one run, or of several to compare: as a PNG, and in the terminal.

  python3 -m dev.plot OUT/metrics.jsonl... [PLOT.png]

Each run is named by its folder. Without a PLOT.png, loss.png is made beside the first file."""
import re, shutil, subprocess, sys
from pathlib import Path
import dev.lib as m


def numbers(key, text):
    """A line "step value" for each line that has both, as they are written. A null, a torn last line and the run's own line have
    not."""
    def number(name, line): return re.search(rf'"{name}" *: *(-?\d[-+\d.eE]*) *[,}}]', line)
    lines = [(number("step", line), number(key, line)) for line in text.splitlines() if not re.match(' *{"run"', line)]
    return "".join(f"{step[1]} {value[1]}\n" for step, value in lines if step and value)


def main():
    files = sys.argv[1:]
    if not files or files[-1] in ("-h", "--help"):
        print(__doc__.strip())
        sys.exit(not files)
    png = files.pop() if files[-1].endswith(".png") else None
    if not files: m.fail("no metrics.jsonl was given, only the picture to make")
    if not shutil.which("gnuplot"): m.fail("gnuplot is missing; sh dev/setup.sh installs it")
    picture, terminal = [], []
    for count, file in enumerate(map(Path, files), 1):
        try: text = file.read_text(errors="replace")
        except OSError: m.fail(f"{file} cannot be read; expected the metrics.jsonl that a run writes into its --out folder")
        series = (("training", "loss", "lines lw 1", ".:,~-"), ("validation", "val_loss", "linespoints lw 2 pt 7", "ox+*#"))
        if not any(numbers(key, text) for _, key, *_ in series):
            m.fail(f'{file} has no losses; expected lines like {{"step":1,"loss":5.5}} or {{"step":1,"val_loss":5.5}}')
        for name, key, style, marks in series:
            points = m.work() / f"{count}.{name}"
            points.write_text(numbers(key, text))
            if not points.stat().st_size: continue
            folder = file.resolve().parent.name.replace("'", "''") # gnuplot wants a quote doubled inside quotes
            title = f"title '{folder}: {name}'"
            picture.append(f"'{points}' with {style} lc {count} {title}")
            terminal.append(f"'{points}' with points pt '{marks[(count - 1) % len(marks)]}' {title}")
    png = png or Path(files[0]).parent / "loss.png"
    if "'" in str(png): m.fail(f"the name of the picture must have no single quote: {png}")
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    common = "set encoding utf8; set key top right; set xlabel 'step' noenhanced; "
    script = m.work() / "picture.gp"
    script.write_text(f"set terminal pngcairo size 1000,600 noenhanced; {common}set ylabel 'loss, nats per token' noenhanced; set "
                      f"grid; set output '{png}'; plot {', '.join(picture)}; unset output\n")
    run = subprocess.run(["gnuplot", script], capture_output=True, text=True)
    if run.returncode: m.fail(f"{png} was not made: {run.stderr.strip().splitlines()[-1]}")
    script.write_text(f"set terminal dumb size {columns - 1 if columns > 20 else 79},24 noenhanced; {common}plot {', '.join(terminal)}\n")
    subprocess.run(["gnuplot", script])
    print(f"plot: {png}")


if __name__ == "__main__": main()
