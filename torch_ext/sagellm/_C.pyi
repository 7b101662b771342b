"""The extension module that setup.py builds from ``cpp/`` and the Rust core."""

from datetime import timedelta
from typing import Any

torch_version_built: str

class Options:
    """Options of one group, for the argument ``pg_options`` of ``init_process_group`` and ``new_group``."""

    def __init__(
        self,
        timeout: timedelta | float = ...,
        engine: str = "auto",
        delegate: str = "gloo",
        fusion: bool = True,
        strict: bool = False,
        algorithm: str = "",
        vendor: str = "auto",
    ) -> None: ...
    def __copy__(self) -> Options: ...
    #: "auto", or "delegate" to have torch's own backend serve the group although shared memory would do.
    engine: str
    #: The built-in backend of torch that serves what the engine cannot: gloo, mpi or ucc.
    delegate: str
    #: Small operations that wait anyway travel together.
    fusion: bool
    #: Ranks on several hosts get the bits of one host: every element is combined in the order of the ranks.
    strict: bool
    #: Rules of which operation goes which way, before those of SAGELLM_ALGORITHM; see docs/choosing.md.
    algorithm: str
    #: How tensors on a device travel: "auto", "host" (through host memory), or "nccl", "hccl", "cncl", also with a file
    #: ("nccl:/path"); SAGELLM_VENDOR has the last word; see docs/devices.md.
    vendor: str
    _library_folders: list[str]
    #: From torch's base class.
    global_ranks_in_group: list[int]
    group_name: str

class SageBackend:
    """The backend of one group; the calls of a c10d backend come from its base class."""

    @property
    def delegate_reason(self) -> str: ...
    @property
    def spans_hosts(self) -> bool: ...
    def describe(self) -> str: ...
    def _explain(self, kind: int, bytes: int, dtype: int) -> str: ...
    def _explain_number(self, number: int) -> str: ...
    #: The library that carries tensors on devices of this kind, or "".
    def _device_library(self, device: str) -> str: ...
    #: Why they travel through host memory.
    def _device_reason(self, device: str) -> str: ...
    #: JSON text, see src/stats/export.rs.
    def _stats(self) -> str: ...
    def _records(self) -> str: ...
    def _reset_stats(self) -> None: ...
    @property
    def options(self) -> Options: ...
    def perform_nocolor_split(self, device: Any) -> None: ...

class Rendezvous:
    """What the ranks of a group decided before it is built; dropped without ``build``, it leaves them in order."""

    #: Why a delegate must serve the whole group, or "".
    @property
    def delegate_reason(self) -> str: ...
    #: Ranks live on several hosts: the group needs a delegate for messages, and a link.
    @property
    def spans_hosts(self) -> bool: ...
    def build(self, delegate: Any = None, link: Any = None) -> SageBackend: ...

def rendezvous(
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta | float,
    group_name: str = "",
    global_ranks: list[int] = ...,
    options: Options | None = None,
) -> Rendezvous: ...
def explain_work(work: Any) -> list[str]: ...
def explain_without_group(kind: int, bytes: int, dtype: int, ranks: int, algorithm: str = "") -> str: ...
def table_without_group(ranks: int, algorithm: str = "") -> str: ...
def save_table(ranks: int, made: str, lines: str) -> str: ...
def set_log_level(level: int) -> None: ...
def drain_log() -> None: ...
def doctor() -> str: ...
def algorithms(kind: str) -> list[str]: ...
def predict(
    kind: str,
    algorithm: str,
    ranks: int,
    sizes: list[float],
    host: tuple[float, float, float],
    network: tuple[float, float, float],
    gamma: float,
    ranks_per_host: int,
) -> list[tuple[float, int]]: ...
def program(
    kind: str, algorithm: str, ranks: int, segments: int, rank: int
) -> tuple[int, list[tuple[int, bool, int, list[int], str]]]: ...

#: Name and bytes of torch's element type with this number.
def _element(number: int) -> tuple[str, int]: ...

#: File, line and function behind the number of a call site; file is "" where there is none.
def _site(number: int) -> tuple[str, int, str]: ...

#: Pairs of places in a list whose tensors' memory overlaps, from the first to the last byte of each.
def _overlapping(tensors: list[Any]) -> list[tuple[int, int]]: ...
def at_exit() -> None: ...
