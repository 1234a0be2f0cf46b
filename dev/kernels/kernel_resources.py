"""kernel_resources.py - what each kernel takes of a multiprocessor, as ptxas says while it compiles it: a table, a row for each
name, with the most that any of its forms takes (registers of a thread; bytes of a thread's local memory, and of a block's static
shared memory). It needs nvcc, and no GPU.

  python3 -m dev.kernels.kernel_resources [--precision bf16] [--capabilities "80 90"] [SOURCE.cu...]

The source is train_gpt2_compress.cu unless others are given: it has every kernel of every program. Those of dev/kernels/cuda want
"80 90a". The status is 1 if a kernel has local memory, into which ptxas spills what has no register; or if it may be launched with
more threads than there are registers for: without __launch_bounds__ that is a block of 1024."""
import re, subprocess, sys, tempfile
from pathlib import Path
from typing import NamedTuple
import dev.lib as m

REGISTERS, MOST_THREADS = 65536, 1024 # of a multiprocessor; of a block
SOURCE = "train_gpt2_compress.cu"


class Kernel(NamedTuple):
    """One form of a kernel on one kind of GPU. spilled: the bytes of local memory that its code writes and reads."""
    form: str
    capability: str
    registers: int
    local: int
    spilled: int
    shared: int
    threads: int  # of its largest block

    @property
    def name(self): return self.form.split("<")[0]

    @property
    def fault(self):
        """What is wrong with it, or ""."""
        where = f"{self.form} on {self.capability}"
        if self.local: return f"{where} keeps {self.local} bytes of local memory, of which {self.spilled} are spilled"
        if self.registers * self.threads <= REGISTERS: return ""
        return f"{where} has {self.registers} registers, too many for a block of {self.threads} threads: it needs __launch_bounds__"


# What ptxas says of a kernel, in its own words.
SAYS = re.compile(r"Compiling entry function '(\S+)' for 'sm_\w+'\n.*\n +(\d+) bytes stack frame, (\d+) bytes spill stores, "
                  r"(\d+) bytes spill loads\n.*Used (\d+) registers(?:.* (\d+) bytes smem)?")
BOUND = re.compile(r"\.entry (\w+)\([^)]*\)\s*(?:\.maxntid (\d+), (\d+), (\d+))?")


def libraries():
    """Where headers are that a program includes. Without Open MPI a program is for one rank, and adds up nothing for others."""
    cuda, mpi = m.ask("sh dev/find_cuda.sh compile cublasLt cudnn nccl"), m.ask("mpicc --showme:compile")
    if not cuda: m.fail("NVIDIA's libraries are missing; sh dev/setup.sh --with-cuda installs them")
    return m.words(cuda.replace("\n", " ")) + (m.words("-DUSE_MPI=1 -DUSE_NCCL=1", mpi) if mpi else [])


def kernels(source=SOURCE, precision="bf16", capability="90"):
    """Every form of every kernel of a source, in the order of their names."""
    with tempfile.TemporaryDirectory() as folder:
        command = m.words(m.environ("NVCC", "nvcc"), f"-std=c++17 -O3 -arch=sm_{capability} -DPRECISION_{precision.upper()}",
                          f"-cubin --resource-usage --keep --keep-dir {folder} -o {folder}/cubin", libraries(), [source])
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode: m.fail(f"nvcc could not compile {source}:\n{run.stderr[-2000:]}")
        ptx = "\n".join(path.read_text() for path in Path(folder).glob("*.ptx"))
    threads = {name: int(x) * int(y) * int(z) if x else MOST_THREADS for name, x, y, z in BOUND.findall(ptx)}
    said = SAYS.findall(run.stdout + run.stderr)
    if {name for name, *_ in said} != threads.keys(): m.fail(f"nvcc has not said what every kernel of {source} takes")
    forms = subprocess.run(["c++filt", "-p"], input="\n".join(name for name, *_ in said), stdout=subprocess.PIPE, text=True,
                           check=True)
    gpu = f"{capability[:-1]}.{capability[-1]}" if capability.isdigit() else capability
    return sorted(Kernel(form, gpu, int(registers), int(local), int(stores) + int(loads), int(shared or 0), threads[name])
                  for form, (name, local, stores, loads, registers, shared) in zip(forms.stdout.splitlines(), said))


def table(found):
    """Of kernels on one kind of GPU or several."""
    gpus, names = sorted({k.capability for k in found}), sorted({k.name for k in found})
    def most(what, name, gpu=None): return max(getattr(k, what) for k in found if k.name == name and gpu in (None, k.capability))
    head = ["kernel", *(f"registers, {gpu}" for gpu in gpus), "local memory", "static shared memory", "threads at most"]
    return m.table(head, *([f"`{name}`", *(most("registers", name, gpu) for gpu in gpus),
                            *(most(what, name) for what in ("local", "shared", "threads"))] for name in names))


def main():
    o = m.options(__doc__, precision="bf16", capabilities=["80", "90"])
    found = [k for source in o.more or [SOURCE] for gpu in o.capabilities for k in kernels(source, o.precision, gpu)]
    print(table(found), end="")
    faults = [k.fault for k in found if k.fault]
    for fault in faults: m.note(f"error: {fault}")
    sys.exit(bool(faults))


if __name__ == "__main__": main()
