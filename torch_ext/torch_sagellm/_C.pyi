"""The extension module that setup.py builds from ``cpp/`` and the Rust core."""

from datetime import timedelta
from typing import Any, TypedDict, final

torch_version_built: str

#: Names of the operations, and of the element types that can be combined, in the order of the core's numbers.
KINDS: tuple[str, ...]
DTYPES: tuple[str, ...]

# The core answers in JSON (src/stats/export.rs, src/select/export.rs). The C++ code parses the JSON without naming its
# fields; this file names them. Times are nanoseconds.

class Alternative(TypedDict):
    way: str
    #: 0 if this algorithm cannot run the operation.
    predicted_ns: int
    why_not: str

class Batch(TypedDict):
    operations: int
    first: int
    last: int
    #: -1 if each operation's algorithm was chosen separately.
    bytes: int

class Past(TypedDict):
    number: int
    host_staged: bool
    #: Code of the choice with which the operation ran, like `code` of `Explanation`; 0 before it has started.
    recorded: int
    batch: Batch | None
    #: Nanoseconds from its issue to its end; 0 while it runs.
    took_ns: int

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
    #: The model's time, this time scaled to earlier calls, and the table's measured time; 0 if unknown.
    predicted_ns: int
    scaled_ns: int
    #: The groups that made these earlier calls, as text; "" if there were none.
    scaled_by: str
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
    #: 0 if it was not measured.
    measured_ns: int

class ChoiceTable(TypedDict):
    note: str
    rules: list[str]
    rows: list[ChoiceRow]

class Cell(TypedDict):
    """Counts of the operations of one kind, path and size class: src/stats/mod.rs."""

    kind: str
    path: str
    #: -1 if several classes share the entry.
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
    #: For each bucket of the histogram: the first value beyond it, and its count.
    times: list[list[int]]

class Stats(TypedDict):
    rank: int
    size: int
    #: The time at which the statistics were read: `now` on the clock of the records, `wall` since the epoch.
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

class Total(TypedDict):
    """The sums of one kind of operation, with fields like those of `Cell`."""

    kind: str
    count: int
    bytes: int
    waiting: int

class Totals(TypedDict):
    #: As in `Stats`.
    since: int
    kinds: list[Total]

class Record(TypedDict):
    """One of the last operations: src/stats/history.rs. A rank of -1 means no rank or any rank."""

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
        numa: bool = False,
        threads: int = 0,
        links: int = 1,
        soft_timeout: float | None = None,
        verify: str = "off",
        on_device_failure: str = "raise",
        blocking_wait: bool = False,
    ) -> None: ...
    def __copy__(self) -> Options: ...
    #: "auto", or "delegate" to make the delegate serve the group even if the engine could.
    engine: str
    #: The built-in backend of torch that serves a group which the engine cannot: gloo, mpi or ucc.
    delegate: str
    #: Whether small operations that are pending at the same time are fused.
    fusion: bool
    #: Whether ranks on several hosts get the same bits as on one host: every element is combined in the order of the
    #: ranks.
    strict: bool
    #: Rules for the algorithm choice, with priority over SAGELLM_ALGORITHM's rules; see docs/choosing.md.
    algorithm: str
    #: How device tensors are carried: "auto", "host" (through host memory), "nccl", "hccl" or "cncl", optionally with a
    #: file ("nccl:/path"). SAGELLM_VENDOR overrides it; see docs/devices.md.
    vendor: str
    #: The topology in the form of `TopologyInfo.option()`, or ""; see docs/choosing.md.
    topology: str
    #: Whether the link between hosts is measured when the group is created; the measurement then selects algorithms. If
    #: False, the start rules select them. Rank 0's value applies to the group; SAGELLM_MEASURE_LINK overrides it; see
    #: docs/choosing.md.
    measure_link: bool
    #: Whether large CPU tensors that peers can reach are summed (all_reduce, reduce) and broadcast NUMA node by node,
    #: if a host has at least 13 ranks of the group, each bound to one node, on each node equally many with consecutive
    #: numbers; if all are on one node, the same applies to its last-level caches. The results have the same bits. Each
    #: host's first rank decides for its host, and says in the log if this is impossible; SAGELLM_NUMA overrides it; see
    #: docs/tuning.md.
    numa: bool
    #: Largest number of threads that copy and combine large CPU tensors: torch's, while a thread of this rank waits,
    #: in a synchronous call or in ``wait()``; else as many as the rank has cores that torch's threads leave free. 0
    #: means ``torch.get_num_threads()``, but at most one thread per core for all ranks of a host together. No rank
    #: uses more threads than it has cores. All ranks of a group use the smallest number of any rank. A forked process
    #: uses 1. SAGELLM_THREADS overrides it; see docs/tuning.md.
    threads: int
    #: Number of connections to each process on another host, 1 to 16. Two processes use the smaller of their numbers,
    #: and keep these connections for all their groups. SAGELLM_LINKS overrides it; see docs/settings.md.
    links: int
    #: Seconds after which one line of the log reports a pending operation. 0 means never, None means the value of
    #: SAGELLM_SOFT_TIMEOUT. Each rank may have its own value; see docs/hangs.md.
    soft_timeout: float | None
    #: Whether the ranks compare hashes of the results that should be equal on all ranks: "off", "sampled" (a part of
    #: each) or "all". If ":warn" follows, a difference is logged instead of failing the group. Rank 0's value applies
    #: to the group; SAGELLM_VERIFY overrides it; see docs/troubleshooting.md.
    verify: str
    #: How the program learns of a failed call on a device if no thread waits for it: "raise" an exception in the
    #: threads with calls in flight, "exit" the process, or "none". Each rank may have its own value;
    #: SAGELLM_ON_DEVICE_FAILURE overrides it; see docs/devices.md.
    on_device_failure: str
    #: Whether ``wait()`` of a call on a device blocks the host until the call has ended, and raises if the call failed.
    #: Each rank may have its own value; SAGELLM_BLOCKING_WAIT and TORCH_NCCL_BLOCKING_WAIT override it.
    blocking_wait: bool
    _library_folders: list[str]
    #: Whether lists of tensors have gloo's meaning: ``serve_as``.
    _as_gloo: bool
    #: Id of a shrink attempt. Its ranks meet only ranks of the same attempt: ``recover``.
    _attempt: str
    #: Addresses at which other ranks reach this process: ``_private.address``.
    _addresses: str
    #: Whether this process was forked after it had imported torch: ``_private.register``.
    _forked: bool
    #: The rest is defined by torch's base class.
    _timeout: timedelta
    global_ranks_in_group: list[int]
    group_name: str

class SageBackend:
    """The backend of one group; its base class defines the calls of a c10d backend."""

    @property
    def delegate_reason(self) -> str: ...
    def describe(self) -> str: ...
    #: The error with which the whole group failed, or "".
    @property
    def fault(self) -> str: ...
    def _explain(self, kind: str, bytes: int, dtype: str) -> Explanation: ...
    def _explain_number(self, number: int) -> Explanation: ...
    #: The vendor's library that carries tensors on devices of this kind, or "".
    def _device_library(self, device: str) -> str: ...
    #: The reason why tensors on devices of this kind go through host memory.
    def _device_reason(self, device: str) -> str: ...
    def _stats(self) -> Stats: ...
    #: A small part of `_stats`, for callers that ask often.
    def _totals(self) -> Totals: ...
    #: The last `last` records, oldest first, preceded by the record of the oldest pending operation.
    def _records(self, last: int = ...) -> list[Record]: ...
    def _reset_stats(self) -> None: ...
    def _set_default_timeout(self, timeout: timedelta) -> None: ...
    @property
    def _store(self) -> Any: ...
    #: Whether the group failed, or a call of its delegate failed, after which torch's group may be broken.
    def _has_failed(self) -> bool: ...
    #: Sends or receives one message with the bytes of the CPU tensors from `begin` to before `end`. Raises a ValueError
    #: if a delegate serves the group.
    def _send_list(self, tensors: list[Any], begin: int, end: int, dst: int, tag: int) -> Any: ...
    def _recv_list(self, tensors: list[Any], begin: int, end: int, src: int, tag: int) -> Any: ...
    #: One message with the rows `rows` (int64) of a CPU tensor, in this order. Raises a ValueError like
    #: `_all_to_all_rows`.
    def _send_rows(self, tensor: Any, rows: Any, dst: int, tag: int) -> Any: ...
    def _recv_rows(self, tensor: Any, rows: Any, src: int, tag: int) -> Any: ...
    #: An all_to_all of rows of CPU tensors: the i-th sent row is row `input_rows[i]` of `input`, and the i-th received
    #: row becomes row `output_rows[i]` of `output`; None means all rows, in order. The split sizes count rows. Raises a
    #: ValueError if a tensor or its indices are not contiguous, if an index is out of range, if a row would be written
    #: twice, or if a delegate serves the group.
    def _all_to_all_rows(
        self,
        output: Any,
        output_rows: Any | None,
        output_splits: list[int],
        input: Any,
        input_rows: Any | None,
        input_splits: list[int],
        async_op: bool,
    ) -> Any: ...
    #: `_watched`: the other ranks that this rank watches. `_gone`: those of them that have ended or left.
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
    """The decision of the ranks before a group is built.

    If it is dropped without ``build``, the peers learn that this rank leaves.
    """

    #: The reason why a delegate must serve the whole group, or "".
    @property
    def delegate_reason(self) -> str: ...
    #: Whether the ranks are on several hosts, so that they must connect before the group is built.
    @property
    def spans_hosts(self) -> bool: ...
    #: Id of this attempt to create the group: equal on all ranks, and different from every other attempt's.
    @property
    def id(self) -> str: ...
    #: The kind and the number of the addresses at which the ranks reach each other (``Addresses.chosen`` parses it); ""
    #: if the ranks have not agreed on a kind.
    @property
    def network(self) -> str: ...
    #: Publishes that this rank could not connect or create its delegate. Returns the text of the rank that failed
    #: first.
    def _tell_failure(self, text: str) -> str: ...
    #: The text of the rank that failed first, or "".
    def _told_failure(self) -> str: ...
    #: Connects to the other ranks of a group on several hosts. `address` is where they reach this process, `paths` the
    #: address for each of several connections, separated by spaces. `link` says what carries the bytes, as
    #: `RustRendezvous::connect` describes.
    def _connect(self, address: str, paths: str = "", link: str = "tcp") -> None: ...
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

#: The algorithm that the start rules (docs/choosing.md) name for an operation of `ranks` devices. `topology` is in the
#: form of `TopologyInfo.option()`.
def start_rule(kind: str, bytes: int, ranks: int, topology: str) -> StartRule: ...
def table_without_group(ranks: int, algorithm: str = "") -> ChoiceTable: ...
def save_table(ranks: int, made: str, lines: str) -> str: ...
def set_log_level(level: int) -> None: ...
def drain_log() -> None: ...

#: Reports that the exception of a failed call on a device was raised in this thread.
def told_of_failure() -> None: ...
def doctor() -> dict[str, str]: ...

class StepSums(TypedDict):
    """Sums over the steps that have ended, in nanoseconds."""

    count: int
    took: int
    #: Times in calls of ours, and off the processor while a future of ours was pending.
    in_calls: int
    in_futures: int
    #: The sum of both for each of the last steps, oldest first.
    last: list[int]

#: Opens and closes a step on this thread; a step that is closed with False is not counted.
def _begin_step() -> None: ...
def _end_step(well: bool) -> None: ...
def _step_sums() -> StepSums: ...
def _reset_steps() -> None: ...

#: The algorithms that have a schedule for the kind.
def algorithms_of(kind: str) -> list[str]: ...

#: For each size: predicted seconds, and the number of segments.
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

#: Name and size in bytes of torch's element type with this number.
def _element(number: int) -> tuple[str, int]: ...

class SharedUsage(TypedDict):
    """The memory of this process that peers can reach, in bytes except for the two counts."""

    limit: int
    used: int
    #: Memory of freed tensors that is kept for later tensors.
    cached: int
    #: Number of tensors, and number of allocations for which there was no room.
    extents: int
    refused: int
    #: Memory that was made private after an operation had failed.
    taken_out: int
    #: The reason why there is no reachable memory, or "" if that is not known.
    why_not: str

# Tensors in memory that peers can reach (cpp/host/allocator.hpp).
def _shared_tensor(sizes: Any, strides: Any, dtype: Any) -> Any: ...
def _is_shared(tensor: Any) -> bool: ...

#: Serves torch's CPU allocations from reachable memory: on all threads (`everywhere`), or on threads that are within a
#: block of `shared_tensors()`.
def _share_allocations(everywhere: bool) -> None: ...

#: Adds `blocks` to the number of `shared_tensors()` blocks that this thread is within.
def _share_on_this_thread(blocks: int) -> None: ...

#: For tests: whether memory that torch's CPU allocator returns without a deleter is reachable; the memory is freed
#: again.
def _share_raw(bytes: int) -> bool: ...
def _shared_usage() -> SharedUsage: ...

#: The indices of the first two tensors in the list that share memory, or None.
def _shared(tensors: list[Any]) -> tuple[int, int] | None: ...

#: Makes this thread sleep for ever if it asks for the GIL while the interpreter exits. Otherwise this thread would
#: abort the process.
def _outlive_python() -> None: ...

#: Whether the argument is a tensor whose memory receives what a call writes. False for a tensor that torch conjugates
#: or negates when it is read, and for one without data.
def _receives(tensor: Any) -> bool: ...
def at_exit() -> None: ...

# These functions need contiguous tensors on the CPU, and raise a ValueError for any other tensor. Encoded data consists
# of whole blocks: a scale of four bytes, then one byte for each of `block` elements (src/reduce/int8.rs).
def _int8_encode(values: Any, block: int, encoded: Any) -> None: ...

#: The sum of encoded addends that are stored one after the other, in their order, with each scale divided by `divisor`.
def _int8_sum(addends: Any, block: int, divisor: float, summed: Any) -> None: ...
def _int8_decode(encoded: Any, block: int, values: Any) -> None: ...

#: Fills `places` (int32) with the indices of the elements of largest magnitude, in ascending order.
def _largest(values: Any, places: Any) -> None: ...

# The rows of a mixture of experts (src/routing.rs), in tensors of int64. `taken` has, for each rank and expert, how
# many rows the rank sends to the expert.
def _sort_assignments(experts: Any, counts: Any, order: Any) -> None: ...
def _row_figures(taken: Any, experts: int, rank: int, found: Any) -> None: ...
def _rows_leaving(
    taken: Any, rank: int, order: Any, wanted: Any, choices: int, rows: Any, sources: Any, places: Any
) -> None: ...
def _rows_coming(taken: Any, experts: int, rank: int, sorting: Any, unsorted: Any) -> None: ...

#: Groups consecutive tensors of equal dtype and shape: (dtype, shape, number) for each group. None if a tensor is not
#: contiguous in CPU memory. If the tensors are to be written, also None if one requires a gradient or two share memory.
def _runs(tensors: list[Any], written: bool) -> list[tuple[Any, tuple[int, ...], int]] | None: ...

#: Copies the bytes of tensors `begin` to `end` (exclusive) one after the other into a tensor; `_unpack` copies them
#: back.
def _pack(tensors: list[Any], begin: int, end: int, into: Any) -> None: ...
def _unpack(from_: Any, tensors: list[Any], begin: int, end: int) -> None: ...
