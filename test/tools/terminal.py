"""A terminal for programs under test."""
import os, pty, select, signal, time
from suite import ROOT, Run, environment, words


def on_terminal(*command, env={}, seconds=300):
    """Runs a command whose input, output and errors are a terminal. What it wrote there is in Run.out, to the byte."""
    line = words(*command)
    pid, terminal = pty.fork()
    if pid == 0:
        try:
            os.chdir(ROOT)
            os.execvpe(line[0], line, environment(**env))
        finally:
            os._exit(127)
    written, end = b"", time.monotonic() + seconds
    try:
        while select.select([terminal], [], [], max(0, end - time.monotonic()))[0]:
            written += os.read(terminal, 65536)
        os.killpg(pid, signal.SIGKILL)
        written += f"\nit did not end in {seconds} seconds".encode()
    except OSError: pass  # the last program has closed it
    finally: os.close(terminal)
    return Run(line, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), written.decode(errors="replace"), "")
