"""The futures of asynchronous calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torch_sagellm.api.errors import translated, with_timeouts

Result = TypeVar("Result")


class ResultFuture(torch.futures.Future[Result]):  # type: ignore[misc]  # torch has no annotations for mypy
    """The future of a Work. Its ``wait()`` returns ``result``, which is on ``devices``."""

    def __init__(self, work: Any, result: Result, devices: list[torch.device] | None) -> None:
        super().__init__(devices=devices)
        self._work, self._result = work, result
        self._ends_with_wait = False
        if work is None:  # the operation has already ended
            self.set_result(result)
            return
        try:
            inner = work.get_future()
        except RuntimeError:  # gloo's sends and receives have none
            self._ends_with_wait = True
        else:
            inner.add_done_callback(lambda ended: self._end(ended.value))

    def _end(self, value: Callable[[], Any]) -> None:
        """Completes this future with the result or the error of ``value``, which returns immediately."""
        try:
            value()
        except Exception as error:  # torch passes on only the text of the operation's error
            failure = error if isinstance(error, dist.DistBackendError) else dist.DistBackendError(str(error))
            found = translated(failure)
            self.set_exception(error if found is failure else found)
        else:
            self.set_result(self._result)

    def done(self) -> bool:
        """Whether the operation has ended; functions chained by ``then`` may still run."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> Result:
        """Returns the result when the operation has ended; raises what the synchronous form would raise."""
        if self._ends_with_wait:
            if not super().done():
                self._end(self._work.wait)
            super().wait()
        elif self._work is not None:
            with_timeouts(self._work.wait)
        return self._result

    def value(self) -> Result:
        """The result of an operation that has ended, like ``wait()``; a RuntimeError before that."""
        if not self.done():
            raise RuntimeError("sagellm: the operation has not ended yet; wait() waits for it and returns its result")
        # torch's future completes slightly later: on another thread or, for a delegate's messages, in ``wait()``.
        return self.wait()


class CommFuture(ResultFuture[torch.Tensor]):
    """The future of an asynchronous call: ``wait()`` returns its tensor, ``then`` chains a function to it.

    On a device ``wait()`` makes the current stream wait, like a Work of torch. Messages of a group that gloo serves
    have no future in torch: functions that ``then`` chains to them run when ``wait()`` returns.

    Example::

        future = torch_sagellm.create_comm_backend().all_reduce(torch.ones(4), async_op=True)
        total = future.wait()
    """

    def __init__(self, work: Any, result: torch.Tensor) -> None:
        super().__init__(work, result, None if result.is_cpu else [result.device])


class CommListFuture(ResultFuture[list[torch.Tensor]]):
    """The future of an asynchronous call on a list: like ``CommFuture``, but ``wait()`` returns the list of tensors.

    Example::

        future = torch_sagellm.fused_all_reduce([torch.ones(4), torch.ones(2)], async_op=True)
        first, second = future.wait()
    """

    def __init__(self, work: Any, result: list[torch.Tensor]) -> None:
        devices = {each.device for each in result if not each.is_cpu}
        super().__init__(work, result, list(devices) or None)


class Later:
    """Adapts a future of ours to the methods of a Work, for ``CommFuture``."""

    def __init__(self, future: torch.futures.Future[torch.Tensor]) -> None:
        self.get_future = lambda: future
        self.is_completed = future.done
        self.wait = future.wait
