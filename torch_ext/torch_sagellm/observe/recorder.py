"""Shows our operations in torch's own views of the flight recorder: converts our ring when a view is requested.

torch's recorder costs 1.5 us per call and is off for our groups (design rule 29), so its dump would be empty. This file
replaces two functions of torch, ``_dump_fr_trace`` and ``_dump_fr_trace_json`` of ``torch._C._distributed_c10d``, when
the first group is created. For the backend "sagellm" the replacements answer from our ring. If no backend is named,
they add our records to torch's. With ``TORCH_FR_BUFFER_SIZE`` set, torch's recorder records our groups, and nothing is
replaced.

torch's debug server calls a handler in each process by its name; ours is ``sagellm_fr_trace_json``. ``debug_handlers``
registers it and gives the server a page for it.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import pickle
from collections.abc import Callable
from typing import Any

NAME = "sagellm"
HANDLER = "sagellm_fr_trace_json"
DUMP, DUMP_JSON = "_dump_fr_trace", "_dump_fr_trace_json"
#: For each function: the order of its arguments in torch.
ARGUMENTS = {
    DUMP: ("includeCollectives", "includeStackTraces", "onlyActive", "backend"),
    DUMP_JSON: ("includeCollectives", "onlyActive", "backend"),
}
#: The functions of torch that were replaced, by name; empty if none is replaced.
_theirs: dict[str, Callable[..., bytes]] = {}


def install() -> None:
    """Replaces the functions if this torch has them. A second call does nothing."""
    from torch._C import _distributed_c10d as c10d

    module: Any = c10d
    if _theirs:
        return
    for name in (DUMP, DUMP_JSON):
        original = getattr(module, name, None)
        if original is not None:
            _theirs[name] = original
            setattr(module, name, functools.wraps(original)(functools.partial(_asked, name)))


def trace(collectives: bool = True, stacks: bool = True, active: bool = False) -> dict[str, Any]:
    """Our part of a dump, of all groups of this process, with torch's keys and entries; see ``flight.py``."""
    from torch_sagellm.observe import flight

    found = flight.snapshot("all")
    entries = found.pop("entries")
    if collectives:
        kept = [entry for entry in entries if not active or entry["state"] != "completed"]
        found["entries"] = kept if stacks else [{**entry, "frames": []} for entry in kept]
    return found


def _asked(name: str, *arguments: Any, **named: Any) -> bytes:
    """Replaces torch's function ``name``: returns our records, torch's dump or both, by the argument ``backend``."""
    given = dict(zip(ARGUMENTS[name], arguments, strict=False)) | named
    load: Callable[[bytes], Any] = pickle.loads if name == DUMP else json.loads
    store: Callable[[Any], bytes] = pickle.dumps if name == DUMP else _as_json
    # None means torch's own default: all entries, active or not.
    ours = functools.partial(
        trace,
        given.get("includeCollectives") is not False,
        given.get("includeStackTraces") is not False,
        given.get("onlyActive") is True,
    )
    backend = given.get("backend")
    if backend == NAME:
        return store(ours())
    theirs = _theirs[name](*arguments, **named)
    return theirs if backend is not None else store(_merged(load(theirs), ours()))


def _as_json(found: Any) -> bytes:
    return json.dumps(found).encode()


def _merged(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Merges two dumps: our groups get the next numbers, and entries are sorted by time and numbered again."""
    known = [int(number) for number in theirs["pg_status"]] + [entry["pg_id"] for entry in theirs.get("entries", [])]
    first = max(known, default=-1) + 1
    status = {str(int(number) + first): each for number, each in ours["pg_status"].items()}
    found = {
        **theirs,
        "pg_config": {**theirs["pg_config"], **ours["pg_config"]},
        "pg_status": {**theirs["pg_status"], **status},
    }
    if "entries" in theirs or "entries" in ours:
        own, other = ours.get("entries", []), theirs.get("entries", [])
        lost = sum(each[0]["record_id"] for each in (own, other) if each)
        entries = [{**entry, "pg_id": entry["pg_id"] + first} for entry in own] + other
        entries.sort(key=lambda entry: entry["time_created_ns"])
        found["entries"] = [{**entry, "record_id": lost + at} for at, entry in enumerate(entries)]
    return found


def _answer(request: Any, response: Any) -> None:
    """The handler in this process's worker server; it runs on a thread of that server."""
    active = request.get_param("onlyactive").lower() == "true"
    response.set_content(json.dumps(trace(stacks=False, active=active)), "application/json")
    response.set_status(200)


def debug_handlers() -> list[Any] | None:
    """Shows our operations in torch's debug server: ``start_debug_server(handlers=torch_sagellm.debug_handlers())``.

    Every rank calls it, because every rank answers for itself. On rank 0, which runs the server, it returns torch's
    pages and ``/sagellm_fr_trace``, the last operations of our groups on all ranks. On the other ranks it returns None,
    which is the server's default. It raises an ImportError if this torch has no such server, or if a package that the
    server needs is missing.

    Example::

        from torch.distributed.debug import start_debug_server

        start_debug_server(handlers=torch_sagellm.debug_handlers())
    """
    import torch.distributed as dist
    from torch._C import _distributed_c10d as c10d

    module: Any = c10d
    if not hasattr(module, "_register_handler"):
        raise ImportError("sagellm debug_handlers: this torch has no debug server")
    if HANDLER not in module._get_handler_names():
        # torch drops a handler only after the interpreter has ended. Freeing a Python function then aborts the process
        # (observed), so this reference is never dropped.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_answer))
        module._register_handler(HANDLER, _answer)
    if (dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))) != 0:
        return None
    try:
        from torch.distributed.debug import _debug_handlers as pages
    except ModuleNotFoundError as missing:
        raise ImportError(
            f"sagellm debug_handlers: torch's debug server needs {missing.name}, which is not installed: "
            "pip install jinja2 aiohttp tabulate"
        ) from missing

    class Page(pages.FlightRecorderHandler):  # type: ignore[misc]  # torch has no annotations for mypy
        """Like torch's page of the recorder, with the answers of our handler."""

        def routes(self) -> list[Any]:
            return [pages.Route("/sagellm_fr_trace", self._tables), pages.Route("/sagellm_fr_trace_json", self._plain)]

        def nav_links(self) -> list[Any]:
            return [
                pages.NavLink("/sagellm_fr_trace", "FlightRecorder sagellm"),
                pages.NavLink("/sagellm_fr_trace_json", "(JSON)"),
            ]

        def _tables(self, request: Any) -> Any:
            addresses, answers = pages.fetch_all(HANDLER, timeout=self.fetch_timeout)
            return self._render_tables(request.frontend, addresses, list(answers))

        def _plain(self, request: Any) -> Any:
            addresses, answers = pages.fetch_all(HANDLER, timeout=self.fetch_timeout)
            title = "FlightRecorder sagellm"
            return request.frontend.render_template("json_resp.html", title=title, addrs=addresses, resps=answers)

        def dump(self) -> None:
            """Does nothing, because the inherited method would write torch's own trace a second time."""

        def dump_filename(self) -> str:
            return "sagellm_fr_trace"

    return [*pages.default_handlers(), Page()]
