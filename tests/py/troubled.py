"""Starts a store that a test slows down, stops or ends (`troubled_store`)."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from harness import Context
from limits import patience

SERVER = Path(__file__).with_name("troubled_store.py")


def store_of_its_own(ctx: Context, host: str) -> tuple[dist.Store, subprocess.Popen[str] | None]:
    """Returns a store for a group, and on rank 0 the process of the store's server, which rank 0 starts at the address
    `host`."""
    place, server = Path(ctx.tmp) / "port", None
    if ctx.rank == 0:
        server = subprocess.Popen([sys.executable, str(SERVER), host], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        place.with_suffix(".new").write_text(server.stdout.readline())
        place.with_suffix(".new").rename(place)
    end = time.monotonic() + patience(30)
    while not place.exists():
        assert time.monotonic() < end, "no store"
        time.sleep(0.01)
    client = dist.TCPStore(host, int(place.read_text()), is_master=False, timeout=timedelta(seconds=60))
    return client, server
