"""A process that has imported torch once and forks ranks from that state.

Importing torch costs seconds, because many tests share few cores. Only the zygote pays for it: every rank is a fork of
the zygote and runs one function. A rank whose function has returned ends by `end`. All other ends (an exception,
SystemExit, a signal) are the interpreter's own. With `normal_exit` all ends are. Exit codes therefore mean what they
mean in a program. The zygote itself never makes a process group and starts no thread.

Requests and replies are JSON lines on stdin and stdout: `{"spawn": {...}}` returns `{"pid": n}`, `{"poll": pid}`
returns `{"status": code or null}` (negative for a signal). End of input ends the zygote; its ranks are then killed by a
death signal.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import threading
import traceback
import weakref
from multiprocessing.connection import Client, Connection
from typing import Any

PR_SET_PDEATHSIG = 1
#: The finalizers that existed when the zygote began to fork.
FINALIZERS: list[weakref.finalize[Any, Any]] = []


def describe_error(error: BaseException) -> dict[str, str]:
    """Returns a rank's report of the exception that ended its function."""
    return {
        "type": type(error).__name__,
        "text": str(error),
        "traceback": "".join(traceback.format_exception(error)),
    }


def resolve(module: str, name: str) -> Any:
    """Returns the function `name` of `module`, as the test that sent the two names sees it."""
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def become_rank(order: dict[str, Any]) -> Connection:
    """Turns the fresh fork into a rank with its own process group, output file and environment."""
    # With the zygote's process id, the package would take this process for a fork whose parent may have used torch's
    # threads; the zygote has started none.
    sys.modules["_torch_sagellm_autoload"].PROCESS = os.getpid()  # type: ignore[attr-defined]
    os.setpgid(0, 0)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(null)
    sys.stdin = os.fdopen(0, "r")
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(order["env"])
    for path in reversed(order["sys_path"]):
        if path not in sys.path:
            sys.path.insert(0, path)
    return Client(order["address"], authkey=b"ranks")


def run_order(conn: Connection, order: dict[str, Any]) -> None:
    """Runs the function of this rank and reports how it ended. An error ends the process with code 1."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.set_debug_level_from_env()
    from harness import Context

    conn.send(("hello", order["rank"], os.getpid()))
    module, name, args, kwargs = conn.recv()
    context = Context(conn=conn, **order["context"])
    try:
        value = resolve(module, name)(context, *args, **kwargs)
    except SystemExit:
        raise
    except BaseException as error:
        conn.send(("error", describe_error(error)))
        traceback.print_exc()
        sys.stderr.flush()
        raise SystemExit(1) from None
    conn.send(("value", value))


def end() -> None:
    """Waits for threads and runs the exit functions, as the interpreter does before it destroys its modules.

    Modules are not destroyed. Destroying them would cost a rank 0.35 s of processor time (2-core EPYC, 2026-11-24), ten
    times the rest of a short test, and would copy the memory that the rank shares with the zygote. torch's finalizers
    would also copy that memory (7,000 of the 9,400 page faults of a rank that does nothing), so only finalizers that
    the rank itself made are called.
    """
    threading._shutdown()
    for each in FINALIZERS:
        each.atexit = False
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    """Serves requests until the end of input. In a forked rank, returns after the rank's function."""
    # Nearly every rank needs these imports. In each rank they would take 50 of the 150 ms of processor time of a short
    # test (2-core EPYC, 2026-11-25). Ranks that must import the package like a fresh interpreter are not made here.
    import harness
    import numpy  # noqa: F401
    import torch.distributed  # noqa: F401

    if not harness.IS_GLOO:
        from torch_sagellm._private import load, register  # noqa: F401

        load.extension()
    FINALIZERS.extend(weakref.finalize._registry)  # type: ignore[attr-defined]
    gc.collect()
    gc.freeze()  # so a fork that ends does not walk, and thereby copy, all of torch's modules
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies.write(b'{"ready": true}\n')
    replies.flush()
    while True:
        line = requests.readline()
        if not line:
            return
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            reply: dict[str, Any] = {"status": os.waitstatus_to_exitcode(status) if pid else None}
        else:
            pid = os.fork()
            if pid == 0:
                order = request["spawn"]
                run_order(become_rank(order), order)
                if not order["normal_exit"]:
                    end()
                return
            reply = {"pid": pid}
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


if __name__ == "__main__":
    main()
