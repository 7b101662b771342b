"""Exports the statistics in other programs' formats: Prometheus text, Chrome trace JSON, TensorBoard scalars."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch_sagellm.observe import stats, timeline

if TYPE_CHECKING:
    from torch_sagellm import _C

#: Bounds of the exported histogram in nanoseconds: 1 us to 17 s by powers of four. Buckets of the core end at them.
BOUNDS = [1 << power for power in range(10, 36, 2)]
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def _label(text: object) -> str:
    return str(text).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class Lines:
    """Metrics in the text format: every name once, with its help and type, followed by its samples."""

    def __init__(self) -> None:
        self.names: dict[str, tuple[str, str, list[str]]] = {}

    def add(self, name: str, kind: str, text: str, labels: dict[str, object], value: float, suffix: str = "") -> None:
        each = ",".join(f'{key}="{_label(label)}"' for key, label in labels.items())
        samples = self.names.setdefault(name, (kind, text, []))[2]
        samples.append(f"{name}{suffix}{{{each}}} {value!r}")

    def text(self) -> str:
        parts = []
        for name, (kind, text, samples) in self.names.items():
            parts += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *samples]
        return "\n".join(parts) + "\n" if parts else ""


#: Exported sums of a cell: name of the metric, its key, divisor, help.
SUMS: tuple[tuple[str, stats.Sum, int, str], ...] = (
    ("operations_total", "count", 1, "Calls that ended well."),
    ("failed_operations_total", "failed", 1, "Calls that failed."),
    ("bytes_total", "bytes", 1, "Payload of the calls."),
    ("waiting_seconds_total", "waiting", 10**9, "Time in operations that waited for peers."),
    ("copying_seconds_total", "copying", 10**9, "Time spent copying, where it is measured."),
    ("reducing_seconds_total", "reducing", 10**9, "Time spent reducing, where it is measured."),
)


def prometheus_text(group: Any = "all") -> str:
    """The statistics of this rank in Prometheus' text format 0.0.4; ``group`` as for ``get_stats``.

    All counters start at 0 when the group is created, and at ``reset_stats``, which a scraper sees as a restart.

    Example::

        print(torch_sagellm.prometheus_text())
    """
    lines = Lines()
    for member in stats.members(group):
        raw: _C.Stats = member.backend._stats()
        base: dict[str, object] = {"group": member.name, "rank": raw["rank"]}
        by_path: dict[tuple[str, str], list[_C.Cell]] = {}
        for cell in raw["cells"]:
            by_path.setdefault((cell["kind"], cell["path"]), []).append(cell)
        for (kind, path), cells in sorted(by_path.items()):
            labels = {**base, "op": kind, "path": path}
            for name, key, divisor, text in SUMS:
                total = sum(cell[key] for cell in cells)
                lines.add(f"sagellm_{name}", "counter", text, labels, total if divisor == 1 else total / divisor)
            _histogram(lines, labels, cells)
        lines.add("sagellm_fused_batches_total", "counter", "Batches of operations.", base, raw["batches"])
        lines.add("sagellm_fused_operations_total", "counter", "Operations in batches.", base, raw["batched_ops"])
        for peer, (_, total, _) in enumerate(raw["waits"]):
            if peer != raw["rank"]:
                text = "Time that this rank waited for the peer that came last."
                lines.add("sagellm_waited_for_seconds_total", "counter", text, {**base, "peer": peer}, total / 1e9)
    return lines.text()


def _histogram(lines: Lines, labels: dict[str, object], cells: list[_C.Cell]) -> None:
    name, text = "sagellm_operation_seconds", "Time from issue to end."
    times = stats.merged_times(cells)
    for bound in BOUNDS:
        count = sum(count for end, count in times if end <= bound)
        lines.add(name, "histogram", text, {**labels, "le": repr(bound / 1e9)}, count, "_bucket")
    total = sum(count for _, count in times)
    lines.add(name, "histogram", text, {**labels, "le": "+Inf"}, total, "_bucket")
    lines.add(name, "histogram", text, labels, sum(cell["took"] for cell in cells) / 1e9, "_sum")
    lines.add(name, "histogram", text, labels, total, "_count")


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file atomically: readers see the old file or the complete new one. An OSError names the file.

    A link stays a link to the file. A pipe or a device, such as /dev/stdout, is written to and not replaced.
    """
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not target.is_file():
            with target.open("wb") as there:
                there.write(data)
            return
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise _named(error, f"sagellm: {path} cannot be written") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_prometheus(path: str | os.PathLike[str], group: Any = "all") -> None:
    """Writes ``prometheus_text`` to a file atomically, as a node exporter's textfile collector needs it.

    Example::

        torch_sagellm.write_prometheus("sagellm.prom")  # in the folder of a textfile collector
    """
    write_atomically(path, prometheus_text(group).encode())


def _named(error: OSError, what: str) -> OSError:
    """The same error, with a text that names ``what``."""
    return type(error)(error.errno, f"{what}: {error.strerror}")


class Endpoint:
    """A small HTTP server on its own thread, which runs until ``close`` or the end of the process.

    Example::

        with torch_sagellm.serve_prometheus() as server:
            print(server.url)  # or server.host and server.port
    """

    def __init__(self, host: str, port: int, text: Callable[[], str]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.split("?")[0] not in ("/", "/metrics"):
                    self.send_error(404)
                    return
                body = text().encode()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Logs nothing, because a scrape every few seconds is not worth a line."""

        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
            raise ValueError(f"sagellm serve_prometheus: port is {port!r}, expected 0 (a free one) to 65535")
        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            hint = "; port 0 takes a free one" if error.errno == errno.EADDRINUSE else ""
            raise _named(error, f"sagellm serve_prometheus: cannot listen at {host} port {port}{hint}") from None
        self._server.daemon_threads = True
        self.host = host
        self.port: int = self._server.server_address[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, name="sagellm-prometheus", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the server. A second call does nothing."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def serve_prometheus(port: int = 0, host: str = "127.0.0.1", group: Any = "all") -> Endpoint:
    """Serves ``prometheus_text`` over HTTP at ``/metrics``; port 0 selects a free one, which is ``Endpoint.port``.

    Any process that can reach ``host`` may read the statistics; there is no password. An OSError, which names host and
    port, is raised if the port is in use or ``host`` is not this host. A ValueError is raised if the port is not a
    valid number.

    Example::

        server = torch_sagellm.serve_prometheus(0)  # 0: a port that is free
        print(server.port)
        server.close()
    """
    return Endpoint(host, port, lambda: prometheus_text(group))


def write_trace(path: str | os.PathLike[str], group: Any = "all") -> None:
    """Writes the last operations of this rank as Chrome trace JSON, which Perfetto and chrome://tracing open.

    The rank is one process of the trace, with a row for each group, and more rows if operations ran at the same time.
    Times are wall-clock times; ``merge_traces`` and ``torch-sagellm trace`` merge the files of several ranks. ``group``
    as for ``get_stats``.

    Example::

        torch_sagellm.write_trace(f"trace-{dist.get_rank()}.json")  # then: torch-sagellm trace . -o job.json
    """
    import torch.distributed as dist

    slices: list[timeline.Slice] = []
    for member in stats.members(group):
        raw: _C.Stats = member.backend._stats()
        rank = dist.get_process_group_ranks(member.group)[raw["rank"]]
        slices += timeline.from_records(rank, member.name, member.backend._records(), raw["now"], raw["wall"])
    events = timeline.events(slices)
    write_atomically(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}).encode())


def log_to_tensorboard(writer: Any, step: int, group: Any = "all") -> None:
    """Adds the statistics of this rank to a ``torch.utils.tensorboard.SummaryWriter`` as scalars of this step.

    It uses only ``writer.add_scalar(name, value, step)``. Kinds that were never called are omitted.

    Example::

        class Writer:
            def add_scalar(self, name, value, step):
                print(step, name, value)

        torch_sagellm.log_to_tensorboard(Writer(), step=100)
    """
    for member in stats.members(group):
        told = stats.get_stats(member.group)
        top = f"sagellm/{member.name}"
        for name in ("total_bytes", "avg_latency_ms", "fused_batches", "fused_ops", "failed_count"):
            writer.add_scalar(f"{top}/{name}", told[name], step)
        for kind, op in told["ops"].items():
            if op["count"] == 0:
                continue
            for name in ("count", "bytes", "waiting_ms", "busbw_gbs"):
                writer.add_scalar(f"{top}/{kind}/{name}", op[name], step)
            for name in ("p50_ms", "p99_ms"):
                writer.add_scalar(f"{top}/{kind}/{name}", op["latency"][name], step)
        for peer, wait in told["waits"].items():
            writer.add_scalar(f"{top}/waited_for_ms/{peer}", wait["total_ms"], step)
