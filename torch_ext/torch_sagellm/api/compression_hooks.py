"""Compressed sums on a separate thread, and as hooks of DistributedDataParallel."""

# No `from __future__ import annotations`: DistributedDataParallel checks a hook's annotations, and rejects strings.
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from torch_sagellm.api import formats
from torch_sagellm.api.compression import CompressionStats, compressed_all_reduce, compression
from torch_sagellm.api.formats import Compression


class CompressionThread:
    """A thread that executes compressed sums one after the other, in a separate group.

    So all ranks call the same collectives in the same order, independently of what their other threads call.

    Args:
        group: the ranks; None means the default group. All of them create the thread at the same point.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = _own_group(group)
        formats.hosts_of(self.group)  # now, because later the caller's thread may create groups at the same time
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sagellm-compression")

    def later(self, work: Callable[[], torch.Tensor]) -> torch.futures.Future[torch.Tensor]:
        """Queues ``work`` for the thread, after all earlier calls; returns the future of its result."""
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # a wait for the future raises it
                future.set_exception(error)

        self._thread.submit(run)
        return future

    def close(self) -> None:
        """Ends the thread and destroys the group; all ranks call it after the last sum."""
        self._thread.shutdown()
        among = formats.forget(self.group)
        for group in [self.group] if among is None else [among.across, among.inside, self.group]:
            dist.destroy_process_group(group)


class CompressionHook:
    """Averages the gradients of DistributedDataParallel on the CPU in fewer bytes.

    One thread processes the buckets one after the other, in a separate group. So all ranks call the same collectives in
    the same order for any number of buckets, and the backward pass continues meanwhile.

    Args:
        how: as in ``compressed_all_reduce``, or "topk". The elements that top-k leaves out are kept for each parameter;
            ``hook.compression.residual(parameter)`` returns them.
        group: the ranks of the model; None means the default group. All of them create the hook at the same point.

    Raises:
        ValueError: the compression is unknown. Or the gradients are on a device: this error is raised from the backward
            pass, before anything is sent. Use torch's own hooks on a device.

    Example::

        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
        hook = torch_sagellm.CompressionHook("int8")
        model.register_comm_hook(None, hook)
        model(torch.ones(2, 64)).sum().backward()
        print(hook.stats.saved_bytes)
        hook.close()
    """

    def __init__(self, how: str | Compression, group: Any = None) -> None:
        self.compression = compression(how)
        self.stats = CompressionStats()
        self._thread = CompressionThread(group)
        self.group = self._thread.group
        # DistributedDataParallel reads a hook's names.
        self.__name__ = self.__qualname__ = f"CompressionHook({self.compression.name})"

    def __call__(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        device = bucket.buffer().device
        if device.type != "cpu":
            # On a device the thread would have to order its work with the streams of the backward pass, which is not
            # implemented.
            raise ValueError(
                f"sagellm {self.__name__}: the gradients are on {device}, expected cpu; on a device use the hooks of "
                "torch.distributed.algorithms.ddp_comm_hooks"
            )
        return self._thread.later(lambda: self._average(bucket))

    def _average(self, bucket: Any) -> torch.Tensor:
        # The key consists of the parameters, not of the bucket's number: after the first step DistributedDataParallel
        # fills its buckets in the order in which gradients become ready.
        key = tuple(bucket.parameters())
        return compressed_all_reduce(
            bucket.buffer(), self.compression, op="avg", group=self.group, key=key, stats=self.stats
        )

    def close(self) -> None:
        """Ends the thread and destroys the group; all ranks call it after the last step."""
        self._thread.close()


class PowerSGDHook(CompressionHook):
    """torch's PowerSGD hook for models of any number of buckets.

    torch's hook calls collectives from callbacks of futures, whose order between buckets differs from rank to rank.
    Here one thread processes the buckets one after the other and waits for each. ``stats`` counts bytes as for the
    other formats. The first steps save no bytes, because torch does not compress them (``start_powerSGD_iter``).

    Args:
        state: a ``PowerSGDState`` of ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook``; its group is
            replaced by a separate one.
        group: as for ``CompressionHook``.

    Raises:
        ValueError: as for ``CompressionHook``, from the backward pass.

    Example::

        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
        powersgd = torch_sagellm.PowerSGDHook(PowerSGDState(None, start_powerSGD_iter=2))
        model.register_comm_hook(None, powersgd)
        for _ in range(4):
            model(torch.ones(2, 64)).sum().backward()
        print(powersgd.stats.saved_bytes)
        powersgd.close()
    """

    def __init__(self, state: Any, group: Any = None) -> None:
        super().__init__("fp16", group)
        self.state = state
        state.process_group = self.group
        self.__name__ = self.__qualname__ = "PowerSGDHook"

    def _average(self, bucket: Any) -> torch.Tensor:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

        gradients = bucket.buffer()
        before = self.state.total_numel_after_compression
        result: torch.Tensor = powerSGD_hook(self.state, bucket).wait()
        # torch has added the number of elements that it sent for this bucket, or 0 as long as it does not compress the
        # bucket.
        elements = self.state.total_numel_after_compression - before or gradients.numel()
        self.stats.calls += 1
        self.stats.plain_bytes += gradients.nbytes
        self.stats.sent_bytes += elements * gradients.element_size()
        return result


def _own_group(group: Any) -> Any:
    base = dist.group.WORLD if group is None else group
    return dist.new_group(dist.get_process_group_ranks(base), use_local_synchronization=True, group_desc="sagellm hook")
