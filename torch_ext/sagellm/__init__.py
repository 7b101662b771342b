"""sagellm: a torch.distributed backend. ``init_process_group("sagellm")`` is all a program needs.

torch imports this file in every process that imports torch (the entry-point group ``torch.backends``), even in those
that never use the backend. So it loads no extension, starts no thread and opens nothing: it registers the name, and
the rest happens when a group is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sagellm._C import Options as Options
    from sagellm._fused import fused_all_reduce as fused_all_reduce
    from sagellm.observe.explain import Explanation as Explanation
    from sagellm.observe.explain import TopologyInfo as TopologyInfo
    from sagellm.observe.explain import explain as explain
    from sagellm.observe.explain import select_all_reduce_algorithm as select_all_reduce_algorithm
    from sagellm.observe.export import log_to_tensorboard as log_to_tensorboard
    from sagellm.observe.export import prometheus_text as prometheus_text
    from sagellm.observe.export import serve_prometheus as serve_prometheus
    from sagellm.observe.export import write_prometheus as write_prometheus
    from sagellm.observe.export import write_trace as write_trace
    from sagellm.observe.flight import convert_dumps as convert_dumps
    from sagellm.observe.flight import dump_flight_record as dump_flight_record
    from sagellm.observe.stats import gather_stats as gather_stats
    from sagellm.observe.stats import get_stats as get_stats
    from sagellm.observe.stats import reset_stats as reset_stats

#: Where the functions of the package live; their modules are loaded when the first of them is used.
_HOMES = {
    "Explanation": "observe.explain",
    "TopologyInfo": "observe.explain",
    "explain": "observe.explain",
    "fused_all_reduce": "_fused",
    "select_all_reduce_algorithm": "observe.explain",
    "get_stats": "observe.stats",
    "reset_stats": "observe.stats",
    "gather_stats": "observe.stats",
    "prometheus_text": "observe.export",
    "write_prometheus": "observe.export",
    "serve_prometheus": "observe.export",
    "write_trace": "observe.export",
    "log_to_tensorboard": "observe.export",
    "dump_flight_record": "observe.flight",
    "convert_dumps": "observe.flight",
}
__all__ = ["Options", "__version__", *_HOMES]


def _autoload() -> None:
    """The function that both entry points name. Registers the backend; calling it again does nothing."""
    from sagellm import _register

    _register.register()


def __getattr__(name: str) -> Any:
    """Loads names that need the extension or its build record on first use."""
    if name == "Options":
        from sagellm import _load

        return _load.extension().Options
    if name == "__version__":
        from sagellm import _load

        return _load.version()
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"sagellm.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'sagellm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# `import sagellm` registers the backend where torch's autoloading is off. It may import torch, and
# torch then calls `_autoload` in the middle of this line, so it must be the last one.
_autoload()
