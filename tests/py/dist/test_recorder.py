"""torch's views of the flight recorder show our calls: its dumps, and the worker and the page of its debug server."""

from __future__ import annotations

import importlib.util
import json
import pickle
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, beyond_gloo, run_fresh, run_script, torch_at_least, torchrun
from torch._C import _distributed_c10d as c10d

pytestmark = [
    beyond_gloo("torch's recorder has its own entries for it"),
    pytest.mark.skipif(
        not hasattr(c10d, "_dump_fr_trace"), reason="this torch has no dump for backends other than nccl"
    ),
]


def titles(dump: dict[str, Any]) -> list[str]:
    return [entry["profiling_name"] for entry in dump["entries"]]


def dumped(ctx: Context) -> None:
    ctx.init()
    other = dist.new_group(backend="gloo")
    dist.all_reduce(torch.ones(8))
    dist.all_reduce(torch.ones(4), group=other)
    pending = dist.broadcast(torch.ones(2), 0, async_op=True) if ctx.rank == 1 else None
    ours = pickle.loads(c10d._dump_fr_trace(backend="sagellm"))
    assert titles(ours)[0] == "sagellm:all_reduce" and ours["entries"][0]["input_sizes"] == [[8]], ours
    assert ours["pg_config"]["0"]["ranks"] == "[0, 1]" and ours["version"]
    # Rank 0 has not called the broadcast, so only rank 1 has it as active.
    active = pickle.loads(c10d._dump_fr_trace(onlyActive=True, backend="sagellm"))
    assert titles(active) == (["sagellm:broadcast"] if ctx.rank == 1 else [])
    assert "entries" not in pickle.loads(c10d._dump_fr_trace(includeCollectives=False, backend="sagellm"))
    # With a backend's name only that backend answers. Without a name both appear, sorted by time, in separate groups.
    if torch_at_least(2, 15):  # older torch cannot return the records of one of its own backends
        assert all(title.startswith("gloo:") for title in titles(pickle.loads(c10d._dump_fr_trace(backend="gloo"))))
    for both in (pickle.loads(c10d._dump_fr_trace()), json.loads(c10d._dump_fr_trace_json(True, False))):
        found = titles(both)
        assert found.index("sagellm:all_reduce") < found.index("gloo:all_reduce")
        groups = {entry["profiling_name"].partition(":")[0]: entry["pg_id"] for entry in both["entries"]}
        assert groups["sagellm"] != groups["gloo"] and {str(each) for each in groups.values()} <= set(both["pg_status"])
        numbers = [entry["record_id"] for entry in both["entries"]]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    ctx.store().set(f"looked{ctx.rank}", "1")
    ctx.store().get(f"looked{1 - ctx.rank}")
    if pending is None:
        dist.broadcast(torch.ones(2), 0)
    else:
        pending.wait()
    dist.destroy_process_group()
    assert titles(pickle.loads(c10d._dump_fr_trace(backend="sagellm"))) == []


def test_torchs_dump_shows_our_operations() -> None:
    run_fresh(dumped, 2)


SERVED = """
import json, sys, types, urllib.request, torch, torch.distributed as dist
from torch._C import _distributed_c10d as c10d
tabulate = types.ModuleType("tabulate")  # torch's page needs it for its tables alone
tabulate.tabulate = lambda rows, **_: str(rows)
sys.modules["tabulate"] = tabulate
dist.init_process_group("sagellm", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(8))
import torch_sagellm
try:
    page = torch_sagellm.debug_handlers()[-1]
except ImportError as missing:
    print(json.dumps(["missing", str(missing)]))
    sys.exit()
torch_sagellm.debug_handlers()
server = c10d._WorkerServer("127.0.0.1", 0)
request = urllib.request.Request(f"http://127.0.0.1:{server.port}/handler/sagellm_fr_trace_json", method="POST")
with urllib.request.urlopen(request, timeout=20) as answer:
    found = json.loads(answer.read())
server.shutdown()
response = types.SimpleNamespace(status_code=200, json=lambda: found)
calls = [call.collective_name for call in page._build_db(["here"], [response]).collectives]
dist.destroy_process_group()
paths, titles = [route.path for route in page.routes()], [entry["profiling_name"] for entry in found["entries"]]
print(json.dumps([paths, titles, calls]))
"""


@pytest.mark.skipif(not hasattr(c10d, "_register_handler"), reason="this torch has no handlers in Python")
def test_the_debug_server_shows_our_operations() -> None:
    """The worker server answers, torch's page makes its tables from the answer, and the process exits without an
    error."""
    done = run_script(["-c", SERVED], warm=True)
    assert done.returncode == 0, done.stdout
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[[") or "missing" in line))
    if found[0] == "missing":
        pytest.skip(f"torch's debug server is not usable here: {found[1]}")
    assert found == [
        ["/sagellm_fr_trace", "/sagellm_fr_trace_json"],
        ["sagellm:all_reduce"],
        ["sagellm:all_reduce"],
    ], done.stdout


BROWSED = """
import sys, time, urllib.request, torch, torch.distributed as dist
import torch_sagellm
from torch.distributed.debug import start_debug_server, stop_debug_server
dist.init_process_group("sagellm")
dist.all_reduce(torch.ones(8))
port = int(sys.argv[1])
start_debug_server(port=port, handlers=torch_sagellm.debug_handlers())
if dist.get_rank() == 0:
    until = time.monotonic() + 40
    while True:
        try:
            page = urllib.request.urlopen(f"http://127.0.0.1:{port}/sagellm_fr_trace", timeout=20).read().decode()
            break
        except OSError:  # it does not listen yet
            assert time.monotonic() < until
            time.sleep(0.2)
    index = urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=20).read().decode()
    print("linked" if 'href="/sagellm_fr_trace"' in index else index)
    print("shown" if "sagellm:all_reduce" in page and "completed" in page else page)
    stop_debug_server()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.skipif(not hasattr(c10d, "_register_handler"), reason="this torch has no handlers in Python")
@pytest.mark.skipif(
    any(importlib.util.find_spec(each) is None for each in ("jinja2", "aiohttp", "tabulate")),
    reason="torch's debug server needs jinja2, aiohttp and tabulate",
)
def test_a_browser_sees_the_operations_of_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "browsed.py"
    script.write_text(BROWSED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    printed = torchrun(script, 2, str(port), timeout=100)
    assert "linked" in printed.splitlines() and "shown" in printed.splitlines(), printed


LACKING = """
import sys
sys.modules["tabulate"] = None  # as where it is not installed
import torch_sagellm
try:
    torch_sagellm.debug_handlers()
except ImportError as error:
    print(error)
"""


@pytest.mark.skipif(not hasattr(c10d, "_register_handler"), reason="this torch has no handlers in Python")
def test_a_package_that_the_debug_server_lacks_is_named() -> None:
    done = run_script(["-c", LACKING], warm=True)
    assert done.returncode == 0 and "needs tabulate" in done.stdout and "pip install" in done.stdout, done.stdout


RECORDED = """
import pickle, torch, torch.distributed as dist
from torch._C import _distributed_c10d as c10d
before = c10d._dump_fr_trace
dist.init_process_group("sagellm", store=dist.HashStore(), rank=0, world_size=1)
print(c10d._dump_fr_trace is before)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("size", ["", "100"])
def test_nothing_is_replaced_where_torchs_recorder_is_asked_for(size: str) -> None:
    done = run_script(["-c", RECORDED], env={"TORCH_FR_BUFFER_SIZE": size})
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == str(bool(size)), done.stdout
