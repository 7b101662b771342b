"""A store server that a test slows down, stops or ends: `python troubled_store.py HOST` prints its port.

Clients connect to a relay in front of the server. After SIGUSR1 the relay delays all data from clients by `LATE`
seconds. SIGSTOP stops relay and server. After SIGUSR2 the program ends between two requests. It also ends with the
process that started it.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
from typing import Any

#: Delay of each request in seconds while the store is slow.
LATE = 2.0
late = 0.0
lock = threading.Lock()
#: Sockets of the clients, and those of clients that wait for an answer.
clients: list[socket.socket] = []
waiting: set[socket.socket] = set()


def slow_down(*_: Any) -> None:
    global late
    late = LATE


def end(*_: Any) -> None:
    asked = select.poll()
    for each in clients:
        asked.register(each, select.POLLIN)
    while True:
        with lock:
            if not waiting and not asked.poll(0):
                os._exit(0)
        time.sleep(0.001)


def pass_on(source: socket.socket, target: socket.socket, is_request: bool) -> None:
    try:
        while data := source.recv(1 << 16):
            if is_request:
                with lock:
                    waiting.add(source)
                time.sleep(late)
            target.sendall(data)
            if not is_request:
                with lock:
                    waiting.discard(target)
    except OSError:
        pass
    for each in (source, target):
        each.close()


def main() -> None:
    import torch.distributed as dist

    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGUSR1, slow_down)
    signal.signal(signal.SIGUSR2, end)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    relay = socket.create_server((sys.argv[1], 0))
    print(relay.getsockname()[1], flush=True)

    def serve() -> None:
        while True:
            client, _ = relay.accept()
            clients.append(client)
            server = socket.create_connection(("127.0.0.1", store.port))
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=pass_on, args=(client, server, True), daemon=True).start()
            threading.Thread(target=pass_on, args=(server, client, False), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
