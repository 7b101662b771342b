"""Programs and commands that a test starts as a user starts them. See `harness.py`."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from limits import patience

HERE = Path(__file__).resolve().parent
#: The environment before the tests change it. `conftest` stores it after collection, because imports of the tests set
#: variables, too.
BEFORE = dict(os.environ)
_NO_HOSTNAME = re.compile(r"(?m)^\[W[^]]*\] \[c10d\] The hostname of the client socket cannot be retrieved\..*\n")


def end_server(process: subprocess.Popen[bytes], tmp: Path) -> None:
    """Ends a server that runs until the end of its input, kills it if it does not end, and removes its folder."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    if process.poll() is None:
        process.kill()
    shutil.rmtree(tmp, ignore_errors=True)


def without_noise(output: str) -> str:
    """Returns the output of a program without the warning of torch's store that a name server has not answered. Whether
    the warning comes depends on the machine at that moment."""
    return _NO_HOSTNAME.sub("", output)


class Warm:
    """The server of `warm.py`, a Python that has imported torch. One for each test session, started when first
    needed."""

    _one: Warm | None = None

    def __init__(self) -> None:
        self.tmp = Path(tempfile.mkdtemp(prefix="warm-"))
        self.python = self.tmp / "python"
        program = HERE / "warm.py"
        found = importlib.util.find_spec("torch_sagellm")
        package = str(Path(found.origin).parent) if found is not None and found.origin else ""
        call = (
            f"import sys\nsys.path[:0] = [{str(HERE)!r}]\nimport warm\nwarm.client({str(self.tmp)!r}, sys.argv[1:])\n"
        )
        self.python.write_text(f"#!{sys.executable} -IS\n{call}")
        self.python.chmod(0o755)
        self.process = subprocess.Popen(
            [sys.executable, str(program), str(self.tmp), package, str(self.python)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(BEFORE, OMP_NUM_THREADS="1"),
        )
        assert self.process.stdout is not None
        if self.process.stdout.readline() != b"ready\n":
            raise RuntimeError("the server of warm.py ended before it was ready")

    @classmethod
    def get(cls) -> Warm:
        """Returns the session's server."""
        if cls._one is None or cls._one.process.poll() is not None:
            cls._one = Warm()
            atexit.register(cls._one.close)
        return cls._one

    def close(self) -> None:
        """Ends the server and the programs that it has started."""
        end_server(self.process, self.tmp)


def warm_python() -> str:
    """Returns a Python that starts with torch imported, or the real one if `cold_because` of `warm.py` says so."""
    return str(Warm.get().python)


def run_warm(*words: str, timeout: float = 100.0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `warm_python` with these arguments. Captures stdout and stderr separately."""
    return subprocess.run(
        [warm_python(), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=patience(timeout),
        check=False,
    )


def run_script(
    arguments: list[str],
    timeout: float = 120.0,
    env: dict[str, str] | None = None,
    cwd: str | Path | None = None,
    warm: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Runs this Python with `arguments` in its own process group, and kills the whole group at the deadline.

    `warm`: runs in a fork that has imported torch (`warm.py`), for tests of the program and not of its start.
    """
    full = dict(os.environ, OMP_NUM_THREADS="1", **(env or {}))
    full.setdefault("GLOO_SOCKET_IFNAME", "lo")
    process = subprocess.Popen(
        [warm_python() if warm else sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=full,
        cwd=cwd,
        start_new_session=True,
    )
    limit = patience(timeout)
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"{arguments} did not end within {limit} s\n{output[-6000:]}") from None
    return subprocess.CompletedProcess(arguments, process.returncode, without_noise(output), "")


def in_new_process(code: str, **environment: str) -> dict[str, Any]:
    """Runs `code` in a fresh interpreter in an unrelated folder. The last line that it prints is JSON."""
    done = run_script(["-c", code], env=environment, cwd="/")
    assert done.returncode == 0, done.stdout
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def torchrun(
    script: str | Path,
    ranks: int,
    *args: str,
    timeout: float = 150.0,
    env: dict[str, str] | None = None,
    warm: bool = True,
) -> str:
    """Runs a script under torchrun on this host, requires that it succeeds, and returns its output: torchrun's own,
    then each rank's. Each rank writes to files of its own, because two ranks that print to one pipe write into each
    other's lines (torchrun starts Python with ``-u``, so one ``print`` is several writes).

    `warm`: torchrun and the ranks that it starts are forks that have imported torch.
    """
    with tempfile.TemporaryDirectory() as logs:
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["--log-dir", logs, "--redirects", "3", str(script), *args]
        try:
            done = run_script(command, timeout, env, warm=warm)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{of_ranks(logs)[-6000:]}") from None
        output = done.stdout + of_ranks(logs)
    assert done.returncode == 0, f"torchrun {script} ended with {done.returncode}\n{output[-8000:]}"
    return output


def of_ranks(logs: str) -> str:
    """Returns what the ranks have written to torchrun's folder of logs, one file after the other: by attempt, then by
    rank."""
    files = [*Path(logs).glob("*/attempt_*/*/std*.log")]
    files.sort(key=lambda file: (int(file.parts[-3].removeprefix("attempt_")), int(file.parts[-2]), file.name))
    texts = [file.read_text(errors="replace") for file in files]
    return without_noise("".join(text if text.endswith("\n") or not text else f"{text}\n" for text in texts))
