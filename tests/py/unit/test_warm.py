"""A program started by `warm_python` behaves as under the real Python. Where that is impossible, `warm_python` starts
the real Python."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Warm, run_script, run_warm, warm_python
from warm import cold_because

#: Prints what a program finds when it starts.
LOOK = """
import json, os, resource, signal, sys, threading
import __main__
streams = {
    name: [each.encoding, each.errors, each.line_buffering, each.write_through, each.fileno()]
    for name in ("stdin", "stdout", "stderr") for each in (getattr(sys, name),)
}
with os.popen("echo $GREETING") as shell:
    native = shell.read()
print(json.dumps({
    "words": sys.argv, "path": sys.path, "flags": str(sys.flags), "folder": os.getcwd(), "streams": streams,
    "environment": dict(os.environ), "native": native,
    "main": {name: type(value).__name__ for name, value in vars(__main__).items()},
    "texts": [value for name, value in sorted(vars(__main__).items()) if isinstance(value, str)],
    "loader": getattr(__main__.__loader__, "__name__", type(__main__.__loader__).__name__), "name": __name__,
    "signals": {int(each): str(signal.getsignal(each)) for each in signal.valid_signals()},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), "mask": os.umask(0o077),
    "limits": [resource.getrlimit(each) for each in range(10)], "threads": threading.active_count(),
    "system threads": len(os.listdir("/proc/self/task")), "leads": os.getpgid(0) == os.getpid(),
    "descriptors": sorted(int(each) for each in os.listdir("/proc/self/fd"))[:3], "input": sys.stdin.read(),
    "warm": "torch" in sys.modules, "tests": [name for name in ("pytest", "harness", "warm") if name in sys.modules],
}))
"""
#: Ways in which a program ends.
ENDS = {
    "returns": "print('out')",
    "exit 3": "import sys; sys.exit(3)",
    "exit text": "import sys; print('out'); sys.exit('why')",
    "raises": "def fails():\n    raise ValueError('no')\nprint('out')\nfails()",
    "chain": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('a') from error",
    "syntax": "a = = 3",
    "hook": "import sys\nsys.excepthook = lambda *what: print('hook', what[0])\nraise KeyError",
    "at exit": "import atexit\natexit.register(print, 'last')\nprint('first')",
    "thread": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()",
    "at once": "import os; os._exit(7)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "interrupted": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
}


def both(words: list[str], folder: Path) -> Iterator[subprocess.CompletedProcess[str]]:
    """Runs the program in the real Python and in a fork."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GREETING": "h\u00e9llo"}
    for python in (sys.executable, warm_python()):
        yield subprocess.run(
            [python, *words],
            env=env,
            input="typed",
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            cwd=folder,
            start_new_session=True,
        )


@pytest.mark.parametrize("kind", ["-c", "-m", "-u", "file"])
def test_it_finds_what_a_fresh_interpreter_finds(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "look.py"
    file.write_text(LOOK)
    # The module's folder is the current one, which is first on the path.
    words = {"-c": ["-c", LOOK], "-m": ["-m", "look"], "-u": ["-u", str(file)], "file": [str(file)]}[kind]
    found = []
    for done in both([*words, "one", "-two"], tmp_path):
        assert done.returncode == 0 and not done.stderr, done
        found.append(json.loads(done.stdout))
    fresh, warm = found
    assert (fresh.pop("warm"), warm.pop("warm")) == (False, True), "else the two are the same for nothing"
    assert warm.pop("tests") == fresh.pop("tests") == []
    assert warm == fresh


@pytest.mark.parametrize("how", ENDS)
def test_it_ends_as_the_program_ended(how: str, tmp_path: Path) -> None:
    file = tmp_path / "ends.py"
    file.write_text(ENDS[how])
    for words in (["-c", ENDS[how]], [str(file)]):
        fresh, warm = both(words, tmp_path)
        assert (warm.returncode, warm.stdout) == (fresh.returncode, fresh.stdout), (fresh, warm)
        if how == "interrupted":  # the fork's stack has frames above the program's frames
            assert warm.stderr.splitlines()[-1] == fresh.stderr.splitlines()[-1] == "KeyboardInterrupt"
        else:
            assert warm.stderr == fresh.stderr


SLEEPS = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(100)"


@contextlib.contextmanager
def sleeper() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A warm program that sleeps, and its process id."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([warm_python(), "-c", SLEEPS], env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_reach_it(number: signal.Signals) -> None:
    with sleeper() as (process, pid):
        assert pid != process.pid
        process.send_signal(number)
        assert process.wait(100) == -number


def test_it_ends_when_its_client_is_killed() -> None:
    with sleeper() as (process, pid):
        process.kill()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and Path(f"/proc/{pid}").exists():
            time.sleep(0.01)
        assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["-c", "pass"], None),
        (["-u", "-m", "torch_sagellm"], None),
        ([__file__], None),
        ([], "flags"),
        (["-S", "-c", "pass"], "flags"),
        (["-W", "error", "-m", "torch_sagellm"], "flags"),
        (["-c"], "no program"),
        (["/no/such/file.py"], "no file"),
        (["PACKAGE/cli/libraries.py", "x"], "fresh interpreter for its own file"),
    ],
)
def test_what_needs_a_fresh_interpreter_gets_one(
    words: list[str], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("warm._is_passed_on", lambda _: False)  # ignores the inheritable descriptors of pytest
    known = json.loads((Warm.get().tmp / "known.json").read_text())
    words = [each.replace("PACKAGE", known["package"]) for each in words]
    found = cold_because(words, known)
    assert found is None if reason is None else found is not None and reason in found, found
    others = {"PYTHONPATH": "/x", "TORCH_FR_BUFFER_SIZE": "9", "OMP_NUM_THREADS": "2", "SAGELLM_AS": "x"}
    for name, text in others.items():
        with monkeypatch.context() as changed:
            changed.setenv(name, text)
            assert cold_because(words, known) is not None, name
    with monkeypatch.context() as changed:
        changed.setenv("SAGELLM_ALGORITHM", "x")
        changed.setenv("TORCHELASTIC_RUN_ID", "x")
        assert cold_because(words, known) == found


WARM = "import sys; print('torch' in sys.modules)"


def test_variables_and_limits_decide() -> None:
    """A program that a warm program starts by `sys.executable` is warm too."""
    assert run_warm("-c", WARM).stdout == "True\n"
    assert run_warm("-c", WARM, TORCH_SHOW_CPP_STACKTRACES="1").stdout == "False\n"
    again = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WARM!r}])"
    assert run_warm("-c", again).stdout == "True\n"
    limited = f"import os, subprocess, sys; os.umask(0o77); subprocess.run([sys.executable, '-c', {WARM!r}])"
    assert run_warm("-c", limited).stdout == "False\n"
    passing = f"import os, subprocess, sys; subprocess.run([sys.executable, '-c', {WARM!r}], pass_fds=[os.dup(1)])"
    assert run_warm("-c", passing).stdout == "False\n"
    assert run_script(["-c", WARM]).stdout == "False\n", "unless it is asked for"


def test_it_enters_the_network_of_its_client(lone_host: str) -> None:
    code = "import os, sys; print('torch' in sys.modules, sorted(os.listdir('/sys/class/net')))"
    found = []
    for python in (sys.executable, warm_python()):
        words = ["ip", "netns", "exec", lone_host, python, "-c", code]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.split(" ", 1))
    assert [warm for warm, _ in found] == ["False", "True"]
    assert found[0][1] == found[1][1] != f"{sorted(os.listdir('/sys/class/net'))}\n"


def test_the_deadline_ends_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline also ends programs that the program has started in its process group."""
    import scripts

    monkeypatch.setattr(scripts, "patience", float)
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEPS!r}])"
    with pytest.raises(AssertionError, match="did not end within") as told:
        run_script(["-c", code], timeout=5, warm=True)
    pid = int(str(told.value).splitlines()[-1])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and Path(f"/proc/{pid}").exists():
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()
