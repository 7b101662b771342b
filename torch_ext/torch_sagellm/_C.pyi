"""The extension module that setup.py builds from ``cpp/`` and the Rust core."""

from datetime import timedelta
from typing import Any, TypedDict, final

torch_version_built: str

#: Names of the operations, and of the element types that can be combined, in the order of the core's numbers.
KINDS: tuple[str, ...]
DTYPES: tuple[str, ...]

# The core answers in JSON (src/stats/export.rs, src/select/export.rs), whose fields are named here and nowhere between.
# Times are nanoseconds.

class Alternative(TypedDict):
    way: str
    #: 0 where this algorithm cannot run the operation.
    predicted_ns: int
    why_not: str

class Batch(TypedDict):
    operations: int
    first: int
    last: int
    #: -1 where each operation was chosen alone.
    bytes: int

class Past(TypedDict):
    number: int
    host_staged: bool
    #: 0 before it has started.
    recorded: int
    batch: Batch | None

@final
class Explanation(TypedDict):
    kind: str
    bytes: int
    ranks: int
    hosts: int
    slot_bytes: int
    choice: str
    reason: str
    code: int
    decided: str
    #: 0 where it is unknown; the same for the next.
    predicted_ns: int
    measured_ns: int
    table: str
    overruled: list[str]
    rejected: list[Alternative]
    #: None for a hypothetical operation.
    past: Past | None

@final
class Carried(TypedDict):
    """A call that the library of a device's vendor ran."""

    kind: str
    bytes: int
    ranks: int
    number: int
    library: str
    decided: str
    #: The algorithm that the library reports, or "".
    ran: str

class StartRule(TypedDict):
    kind: str
    bytes: int
    ranks: int
    hosts: int
    choice: str
    reason: str
    decided: str

class ChoiceRow(TypedDict):
    kind: str
    sizes: str
    way: str
    reason: str
    #: 0 where it was not measured.
    measured_ns: int

class ChoiceTable(TypedDict):
    note: str
    rules: list[str]
    rows: list[ChoiceRow]

class Cell(TypedDict):
    """Counts of the operations of one kind, path and size class: src/stats/mod.rs."""

    kind: str
    path: str
    #: -1 where several classes share the entry.
    size_class: int
    count: int
    failed: int
    tensors: int
    bytes: int
    whole: int
    took: int
    waiting: int
    copying: int
    reducing: int
    longest: int
    #: The first value beyond each bucket, and its count.
    times: list[list[int]]

class Stats(TypedDict):
    rank: int
    size: int
    #: The time of reading on the clock of the records, and since the epoch.
    now: int
    wall: int
    since: int
    issued: int
    batches: int
    batched_ops: int
    largest_batch: int
    host_staged_count: int
    host_staged_bytes: int
    #: By rank: number of waits, total time, longest wait.
    waits: list[list[int]]
    cells: list[Cell]

class Record(TypedDict):
    """One of the last operations: src/stats/history.rs. Ranks are -1 for no rank or any rank."""

    id: int
    number: int
    kind: str
    dtype: str
    op: str
    path: str
    reason: str
    state: str
    counts: bool
    tensors: int
    element: int
    site: int
    host_staged: bool
    root: int
    tag: int
    late: int
    together: int
    first: int
    last: int
    read: int
    written: int
    issued: int
    ended: int
    waiting: int
    copying: int
    reducing: int

class Options:
    """Options of one group, for the argument ``pg_options`` of ``init_process_group`` and ``new_group``.

    The deadline of operations is not among them: it is the argument ``timeout`` of these functions.
    """

    def __init__(
        self,
        *,
        engine: str = "auto",
        delegate: str = "gloo",
        fusion: bool = True,
        strict: bool = False,
        algorithm: str = "",
        vendor: str = "auto",
        topology: str = "",
        measure_link: bool = True,
        soft_timeout: float | None = None,
        on_device_failure: str = "raise",
        blocking_wait: bool = False,
    ) -> None: ...
    def __copy__(self) -> Options: ...
    #: "auto", or "delegate" to have torch's own backend serve the group even where shared memory could.
    engine: str
    #: The built-in backend of torch that serves what the engine cannot: gloo, mpi or ucc.
    delegate: str
    #: Fuses small operations that are pending at the same time.
    fusion: bool
    #: Gives ranks on several hosts the bits of one host: every element is combined in the order of the ranks.
    strict: bool
    #: Rules for the algorithm choice, with priority over those of SAGELLM_ALGORITHM; see docs/choosing.md.
    algorithm: str
    #: The path of tensors on a device: "auto", "host" (through host memory), "nccl", "hccl", "cncl", also with a file
    #: ("nccl:/path"); SAGELLM_VENDOR overrides it; see docs/devices.md.
    vendor: str
    #: The topology, as `TopologyInfo.option()` writes it, or ""; see docs/choosing.md.
    topology: str
    #: Measures the link between hosts when the group is made, by which algorithms are chosen there; if False, the start
    #: rules choose them. Rank 0's holds for the group; SAGELLM_MEASURE_LINK overrides it; see docs/choosing.md.
    measure_link: bool
    #: Seconds after which one line of the log reports a pending operation, 0: never; None: by SAGELLM_SOFT_TIMEOUT.
    #: Local to a rank; see docs/hangs.md.
    soft_timeout: float | None
    #: How the program learns of a failed call on a device for which no thread waits: "raise" an exception in the
    #: threads whose calls are under way, "exit" the process, or "none". Local to a rank; SAGELLM_ON_DEVICE_FAILURE
    #: overrides it; see docs/devices.md.
    on_device_failure: str
    #: ``wait()`` of a call on a device blocks the host until the call has ended, and raises where it failed. Local to a
    #: rank; SAGELLM_BLOCKING_WAIT and TORCH_NCCL_BLOCKING_WAIT override it.
    blocking_wait: bool
    _library_folders: list[str]
    #: Lists of tensors mean what they mean in gloo: ``serve_as``.
    _as_gloo: bool
    #: Ranks of a shrink meet only those of the same attempt: ``recover``.
    _attempt: str
    #: Where other ranks reach this process: ``_private.address``.
    _addresses: str
    #: From torch's base class.
    _timeout: timedelta
    global_ranks_in_group: list[int]
    group_name: str

class SageBackend:
    """The backend of one group; the calls of a c10d backend come from its base class."""

    @property
    def delegate_reason(self) -> str: ...
    @property
    def spans_hosts(self) -> bool: ...
    def describe(self) -> str: ...
    #: The error with which the whole group failed, or "".
    @property
    def fault(self) -> str: ...
    def _explain(self, kind: str, bytes: int, dtype: str) -> Explanation: ...
    def _explain_number(self, number: int) -> Explanation: ...
    #: The library for tensors on devices of this kind, or "".
    def _device_library(self, device: str) -> str: ...
    #: Why they go through host memory.
    def _device_reason(self, device: str) -> str: ...
    def _stats(self) -> Stats: ...
    #: Oldest first; the last ones, so many, and before them the oldest pending one.
    def _records(self, last: int = ...) -> list[Record]: ...
    def _reset_stats(self) -> None: ...
    def _set_default_timeout(self, timeout: timedelta) -> None: ...
    @property
    def _store(self) -> Any: ...
    #: Whether the group failed, or a call of its delegate did, after which torch's group may be broken.
    def _has_failed(self) -> bool: ...
    #: The other ranks whose end this rank detects, and those of them that have ended or left.
    def _watched(self) -> list[int]: ...
    def _gone(self) -> list[int]: ...
    @property
    def options(self) -> Options: ...
    def perform_nocolor_split(self, device: Any) -> None: ...

class _Manager:
    """torch's coalescing manager; an exception drops the region of ``backends`` and calls ``forget``."""

    def __init__(self, theirs: Any, backends: list[SageBackend], forget: Any) -> None: ...
    def __enter__(self) -> Any: ...
    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any: ...

class Rendezvous:
    """The decision of the ranks before a group is built. Dropped without ``build``, it tells the peers of leaving."""

    #: Why a delegate must serve the whole group, or "".
    @property
    def delegate_reason(self) -> str: ...
    #: Ranks are on several hosts: the group must be connected, and needs a delegate for messages.
    @property
    def spans_hosts(self) -> bool: ...
    #: Equal on all ranks, and of no other attempt to make a group.
    @property
    def id(self) -> str: ...
    #: How the ranks reach each other, as ``_private.address`` reads it; "" where they have not agreed on it.
    @property
    def network(self) -> str: ...
    #: Tells the others that this rank could not connect or make its delegate; the text that the first to fail has told.
    def _tell_failure(self, text: str) -> str: ...
    #: That text, or "".
    def _told_failure(self) -> str: ...
    #: Connects to the other ranks of a group on several hosts, which reach this process at that address.
    def _connect(self, address: str) -> None: ...
    def build(self, delegate: Any = None) -> SageBackend: ...

def rendezvous(
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta | float,
    group_name: str = "",
    global_ranks: list[int] = ...,
    options: Options | None = None,
) -> Rendezvous: ...
def explain_work(work: Any) -> list[Explanation] | list[Carried]: ...
def explain_without_group(kind: str, bytes: int, dtype: str, ranks: int, algorithm: str = "") -> Explanation: ...

#: The start rules for an all_reduce of `ranks` devices with a topology, as an option takes it.
def start_rule(kind: str, bytes: int, ranks: int, topology: str) -> StartRule: ...
def table_without_group(ranks: int, algorithm: str = "") -> ChoiceTable: ...
def save_table(ranks: int, made: str, lines: str) -> str: ...
def set_log_level(level: int) -> None: ...
def drain_log() -> None: ...

#: The exception of a failed call on a device was raised in this thread.
def told_of_failure() -> None: ...
def doctor() -> dict[str, str]: ...

#: The algorithms that have a schedule for the kind.
def algorithms_of(kind: str) -> list[str]: ...

#: Seconds and segments at each size.
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

class SharedUsage(TypedDict):
    """The memory of this process that peers can reach: bytes, but for the two counts."""

    limit: int
    used: int
    #: Of freed tensors, kept for the next ones.
    cached: int
    #: Tensors, and allocations for which there was no room.
    extents: int
    refused: int
    #: Made private after an operation had failed.
    taken_out: int
    #: Why there is none at all, once that is known, or "".
    why_not: str

# Tensors in memory that peers can reach (cpp/host/allocator.hpp).
def _shared_tensor(sizes: Any, strides: Any, dtype: Any) -> Any: ...
def _is_shared(tensor: Any) -> bool: ...

#: Lets torch's CPU allocations be served from it, on all threads (`everywhere`) or on those that ask for it.
def _share_allocations(everywhere: bool) -> None: ...

#: Adds to the number of blocks within which this thread asks for it.
def _share_on_this_thread(blocks: int) -> None: ...

#: For tests: whether memory that torch's CPU allocator gives without a deleter is such; it is freed again.
def _share_raw(bytes: int) -> bool: ...
def _shared_usage() -> SharedUsage: ...

#: The first two places in a list whose tensors have memory in common, or None.
def _shared(tensors: list[Any]) -> tuple[int, int] | None: ...

#: This thread sleeps where it would end the process, because it asks for the GIL while the interpreter ends.
def _outlive_python() -> None: ...

#: Whether it is a tensor whose memory receives what a call writes: not one that torch conjugates or negates when it is
#: read, nor one without data.
def _receives(tensor: Any) -> bool: ...
def at_exit() -> None: ...

# Over contiguous tensors on the CPU; ValueError for others. Encoded are whole blocks: a scale of four bytes, then a
# byte for each of `block` elements (src/reduce/int8.rs).
def _int8_encode(values: Any, block: int, encoded: Any) -> None: ...

#: The sum of addends that lie one behind the other, in their order, with scales divided by `divisor`.
def _int8_sum(addends: Any, block: int, divisor: float, summed: Any) -> None: ...
def _int8_decode(encoded: Any, block: int, values: Any) -> None: ...

#: The places of the elements of largest magnitude, ascending, as many as `places` (int32) has room for.
def _largest(values: Any, places: Any) -> None: ...

# The rows of a mixture of experts (src/routing.rs), in tensors of int64: `taken` is what each rank sends to each
# expert.
def _sort_assignments(experts: Any, counts: Any, order: Any) -> None: ...
def _row_figures(taken: Any, experts: int, rank: int, found: Any) -> None: ...
def _rows_leaving(taken: Any, rank: int, own_last: bool, order: Any, wanted: Any, rows: Any, places: Any) -> None: ...
def _rows_coming(taken: Any, experts: int, rank: int, own_last: bool, sorting: Any, unsorted: Any) -> None: ...

#: Equal tensors of a list that follow each other as one entry: dtype, shape, number. None where one of them does not
#: lie together in memory of the CPU, or is to be written and has a gradient.
def _runs(tensors: list[Any], written: bool) -> list[tuple[Any, tuple[int, ...], int]] | None: ...

#: Copies the bytes of the tensors from `begin` to before `end` one behind the other, and back.
def _pack(tensors: list[Any], begin: int, end: int, into: Any) -> None: ...
def _unpack(from_: Any, tensors: list[Any], begin: int, end: int) -> None: ...
