"""A Python that starts with torch imported. `harness.warm_python` names an executable that replaces `sys.executable`.

An import of torch costs two seconds of processor time, and most programs of these tests do little else. So a server
imports torch and torchrun (but no pytest, no module of the tests, nothing of the package under test) and starts no
thread. The program that is started is a client, which takes milliseconds. It sends its arguments, environment, working
folder and the descriptors 0, 1 and 2 to the server. A fork of the server then becomes the program. The client passes
signals on, and ends as the program ended. If the client is killed, the program and its process group are killed, too.

The fork does what the interpreter does at its start: it sets the arguments, `sys.path`, a new `__main__`, the streams
and Ctrl-C. It starts a new session, and it ends by the interpreter's own exit. If a fork would differ from a fresh
interpreter, the client executes the real Python instead; `cold_because` has the list: flags, variables that are read
while Python or torch starts, other limits, programs of the package itself. The fork enters the network and mount
namespaces of the client, which `ip netns exec` changes. A program that it starts by `sys.executable` is warm, too.

Three things differ, so tests of them start the real Python. torch's import has happened before the program starts. The
parent process is not the process that started the program. A stopped client does not stop the program. One test of each
kind (torchrun of an example and of a script, `doctor`, a program and a command of the pages) starts the real Python,
too.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
#: The signals that the client passes on. No process can catch a stop or a kill, so these are not passed on.
PASSED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE)
#: Prefixes of the names of variables that are read while the system's loader, Python, torch or its libraries start.
AT_START = (
    *("LD_", "GLIBC_", "MALLOC_", "PYTHON", "COVERAGE_", "LC_", "LANG", "TZ", "TMP", "TEMP", "HOME"),
    *("ATEN_", "CUDA_", "DNNL_", "GOMP_", "KINETO_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTORCH_"),
    *("TORCH_", "ASAN_", "UBSAN_", "LSAN_", "TSAN_", "SAGELLM_AS"),
)
#: Exceptions: torchrun sets these variables for its ranks. torch reads them when a group is made, if at all. Only
#: torchrun reads PYTHON_EXEC, and no test depends on how much Kineto logs.
LATER = ("PYTHON_EXEC", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "KINETO_LOG_LEVEL")
SPACES = ("ipc", "user", "uts")
#: Namespaces of the client that the program enters.
ENTERED = ("net", "mnt")


def read_at_start(environment: dict[str, str]) -> dict[str, str]:
    """Returns the variables in which the server and a program must agree."""
    return {name: text for name, text in environment.items() if name.startswith(AT_START) and name not in LATER}


def surroundings() -> list[Any]:
    """Other properties that a fork inherits from the server, and a fresh process from its parent."""
    limits = [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")]
    mask = os.umask(0o022)
    os.umask(mask)
    with open("/proc/self/cgroup") as groups:
        group = groups.read()
    spaces = [os.stat(f"/proc/self/ns/{each}").st_ino for each in SPACES]
    blocked = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    who = [os.getresuid(), os.getresgid(), mask, sorted(os.sched_getaffinity(0)), os.nice(0), blocked]
    return json.loads(json.dumps([limits, spaces, group, who]))


# ------------------------------------------------------------------------------------------------------- the client


def cold_because(words: list[str], known: dict[str, Any]) -> str | None:
    """Returns why this program needs a fresh interpreter, or None if a fork of the server suffices."""
    words = words[1:] if words[:1] == ["-u"] else words
    if words[:1] not in (["-m"], ["-c"]):
        if not words or words[0].startswith("-"):
            return "flags"
        if not os.path.isfile(words[0]):
            return "no file of Python"
        if os.path.realpath(words[0]).startswith(known["package"] + os.sep):
            return "the package wants a fresh interpreter for its own file"
    elif len(words) < 2:
        return "no program"
    if read_at_start(dict(os.environ)) != known["environment"]:
        return "variables that are read at the start"
    if surroundings() != known["surroundings"]:
        return "namespaces, limits, user, mask or cores"
    more = [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2 and _is_passed_on(fd)]
    return f"descriptors {more}" if more else None


def _is_passed_on(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:  # the descriptor of the listing, which is closed by now
        return False


def client(folder: str, words: list[str]) -> NoReturn:
    """Makes the server run the program, and ends with the program's exit status or signal."""
    with open(os.path.join(folder, "known.json")) as file:
        known = json.load(file)
    if cold_because(words, known):
        os.execv(sys.executable, [sys.executable, *words])
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    door.connect(os.path.join(folder, "door"))
    order = {"words": words, "environment": dict(os.environ), "folder": os.getcwd()}
    text = json.dumps(order).encode()  # names and values that are not UTF-8 are escaped, as in os.environ
    socket.send_fds(door, [len(text).to_bytes(8, "little")], [0, 1, 2])
    door.sendall(text)
    for each in PASSED:
        signal.signal(each, lambda number, _: door.send(bytes([number])))
    for fd in (0, 1, 2):  # so readers of the output see its end when the program closes it
        os.close(fd)
    status = int.from_bytes(_receive(door, 4), "little", signed=True)
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _receive(door: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        more = door.recv(size - len(found))
        if not more:
            raise EOFError("the other side ended")
        found += more
    return found


# ------------------------------------------------------------------------------------------------------- the server


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(folder: str, package: str, python: str) -> dict[str, Any]:
    """Forks for every client until the end of stdin. In the forks it returns, with the client's order."""
    import gc
    import tempfile

    import torch.distributed.run

    del sys.modules["torch.distributed.run"], torch.distributed.run  # `python -m` warns of an imported module
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: what they hold at a fork nobody would release in it"
    for name in ("pytest", "torch_sagellm", "harness"):
        assert name not in sys.modules, f"{name} is imported: a program that forgets it would find it"
    assert tempfile.tempdir is None, "the folder for temporary files was chosen before the program's environment"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(os.path.join(folder, "door"))
    listener.listen(128)
    known = {
        "package": package,
        "environment": read_at_start(dict(os.environ)),
        "surroundings": surroundings(),
    }
    with open(os.path.join(folder, "known.json"), "w") as file:
        json.dump(known, file)
    gc.collect()
    gc.freeze()  # so a fork does not walk, and thereby copy, all of torch's modules
    os.write(1, b"ready\n")
    while True:
        readable, _, _ = select.select([0, listener], [], [])
        if 0 in readable:
            os._exit(0)  # no process writes to stdin, so it is readable only at its end
        door, _ = listener.accept()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if os.fork() == 0:
            listener.close()
            die_with_parent()
            return start(door, python)
        door.close()


def start(door: socket.socket, python: str) -> dict[str, Any]:
    """Called in a fork of the server. Forks again, and returns in the child, which becomes the program. The parent
    watches the program and the client until one of them has ended, and exits."""
    try:
        head, fds, _, _ = socket.recv_fds(door, 8, 3)
        order = json.loads(_receive(door, int.from_bytes(head, "little")))
    except (EOFError, OSError, ValueError):
        os._exit(1)
    pid = os.fork()
    if pid:
        for fd in (*fds, 0, 1, 2):
            with contextlib.suppress(OSError):
                os.close(fd)
        watch(door, pid)
    client, _, _ = struct.unpack("3i", door.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    enter_spaces(client)
    door.close()
    os.setsid()
    die_with_parent()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    order["python"] = python
    # As in a fresh interpreter. With the server's process id, the package would take this process for a fork whose
    # parent may have used torch's threads; the server starts none.
    sys.modules["_torch_sagellm_autoload"].PROCESS = os.getpid()  # type: ignore[attr-defined]
    return order


def enter_spaces(client: int) -> None:
    """Enters those namespaces of the client that differ. The client lives until the program has ended."""
    import ctypes

    for space in ENTERED:
        path = f"/proc/{client}/ns/{space}"
        if os.stat(path).st_ino == os.stat(f"/proc/self/ns/{space}").st_ino:
            continue
        fd = os.open(path, os.O_RDONLY)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(fd, 0) != 0:
            raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}", path)
        os.close(fd)


def watch(door: socket.socket, pid: int) -> NoReturn:
    """Watches until the program or its client has ended, then exits."""
    end = os.pidfd_open(pid)
    while True:
        readable, _, _ = select.select([end, door], [], [])
        if end in readable:
            break
        numbers = _read(door)
        if not numbers:
            for kill in (os.killpg, os.kill):  # the program may not have called setsid yet
                with contextlib.suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)
            break
        for number in numbers:
            os.kill(pid, number)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        door.sendall(status.to_bytes(4, "little", signed=True))
    os._exit(0)


def _read(door: socket.socket) -> bytes:
    try:
        return door.recv(16)
    except OSError:
        return b""


# ------------------------------------------------------------------------------------------------------ the program


def become(order: dict[str, Any]) -> list[str]:
    """Puts the fork into the state of a fresh interpreter that has not started its program yet. Returns the command
    line without flags."""
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    for each in PASSED:
        usual = signal.SIG_IGN if each == signal.SIGPIPE else signal.SIG_DFL
        signal.signal(each, signal.default_int_handler if each == signal.SIGINT else usual)
    words: list[str] = order["words"]
    sys.executable = order["python"]
    sys.orig_argv[:] = [sys.executable, *words]
    # stdout already writes to the program's descriptor. Only its buffering depends on the kind of file.
    out: Any = sys.stdout
    out.reconfigure(line_buffering=os.isatty(1), write_through=out.write_through or words[0] == "-u")
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # type: ignore[attr-defined]
    return words[1:] if words[0] == "-u" else words


def run(words: list[str]) -> None:
    """Runs the program like `python WORDS`, in a new `__main__`."""
    import importlib.machinery
    import io
    import runpy
    from types import ModuleType

    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={})
    sys.modules["__main__"] = main
    if words[0] == "-m":
        sys.argv[:] = ["-m", *words[2:]]
        sys.path[0] = os.getcwd()
        runpy._run_module_as_main(words[1])
        return
    if words[0] == "-c":
        sys.argv[:] = ["-c", *words[2:]]
        sys.path[0] = ""
        main.__loader__ = importlib.machinery.BuiltinImporter  # type: ignore[assignment]
        code = compile(words[1], "<string>", "exec")
    else:
        sys.argv[:] = words
        sys.path[0] = os.path.dirname(os.path.realpath(words[0]))
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", words[0])
        main.__file__, main.__dict__["__cached__"] = words[0], None
        with io.open_code(os.path.abspath(words[0])) as file:
            code = compile(file.read(), words[0], "exec")
    exec(code, main.__dict__)


def without_ours(frames: Any) -> Any:
    """Returns the traceback without the frames of this file, which precede the first frame of the program."""
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames


def program(order: dict[str, Any]) -> None:
    """Runs the program in a fork, and ends as the interpreter itself would."""
    try:
        run(become(order))
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        frames = without_ours(error.__traceback__)
        # A program that does not compile has no frame. If this file itself fails, the traceback keeps all frames.
        if frames is not None or isinstance(error, SyntaxError):
            error.__traceback__ = frames
        for stream in (sys.stdout, sys.stderr):  # before the traceback, like the interpreter
            stream.flush()
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(1) from None


if __name__ == "__main__":
    program(serve(*sys.argv[1:]))
