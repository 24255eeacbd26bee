"""Copies to a GPU and back, beside what a torch model computes there.

Inputs are copied on one CUDA stream of the worker's own and results on another; the model computes on the current
stream of the thread that reads. That thread waits for none of it: a second one waits for each block's end on the
device, in order, and has it answered. Until then a block keeps all memory that its copies touch. A block that is
alone has nothing to overlap with: it takes the current stream, and the thread that reads waits for it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from typing import TYPE_CHECKING, Any, Callable, Optional

from . import _tensor as tensors
from ._errors import LinkError

if TYPE_CHECKING:
    from ._worker import Block

BLOCKS = 3  # at a time: one is copied to the device, one is computed, one is copied back
END_SECONDS = 30.0  # what the device may take for its last blocks


class Device:
    """One GPU of a worker. The thread that reads calls all of this; answer is called by another, until close."""

    def __init__(self, torch: Any, name: Any, answer: Callable[[Block, int], None]) -> None:
        self.torch, self.device, self.answer = torch, torch.device(name), answer
        self.into, self.back = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        self.flight: queue.SimpleQueue[Optional[Block]] = queue.SimpleQueue()
        self.begun = self.ended = 0  # blocks that the second thread was to answer, and has answered
        self.thread = threading.Thread(target=self._follow, name="tensorferry-device", daemon=True)
        self.thread.start()

    def idle(self) -> bool:
        return self.begun == self.ended

    def bring(self, block: Block, host: Any) -> Any:
        """An input on the device, for what the model begins from now on. Its block keeps the memory."""
        if block.alone:
            return host.to(self.device, non_blocking=True)
        with self.torch.cuda.stream(self.into):
            x = host.to(self.device, non_blocking=True)
        here = self.torch.cuda.current_stream(self.device)
        here.wait_stream(self.into)
        x.record_stream(here)  # its memory is the other stream's, and the model may keep it
        return x

    def fetch(self, block: Block, y: Any, address: int) -> bool:
        """Begins to copy a result to memory that the block keeps. It reports False if y is not on this device."""
        if getattr(y, "device", None) != self.device:
            return False
        if block.alone:
            block.keep.append(y)
            tensors.write_torch(y, address, non_blocking=True)
            return True
        # A copy of its own: the next block may write to the model's, as a captured graph does.
        y = y.clone(memory_format=self.torch.contiguous_format)
        block.keep.append(y)
        self.back.wait_stream(self.torch.cuda.current_stream(self.device))
        with self.torch.cuda.stream(self.back):
            tensors.write_torch(y, address, non_blocking=True)
        return True

    def follow(self, block: Block) -> None:
        """Has a block answered when all that was begun for it has ended, also where it has failed."""
        try:
            here = self.torch.cuda.current_stream(self.device)
            if block.alone:
                here.synchronize()
            else:
                self.back.wait_stream(here)
                block.event = self.back.record_event(self.torch.cuda.Event(blocking=True))
        except Exception as err:  # CUDA has lost its context, and copies nothing any more
            block.fail(err)
        if block.alone:
            self.answer(block, time.perf_counter_ns() - block.begin)
        else:
            self.begun += 1
            self.flight.put(block)

    def _follow(self) -> None:
        end = 0
        for block in iter(self.flight.get, None):
            try:
                if block.event is not None:
                    block.event.synchronize()
            except Exception as err:  # of a kernel, say
                block.fail(err)
            begin, end = max(block.begin, end), time.perf_counter_ns()
            self.ended += 1
            with contextlib.suppress(LinkError):  # the thread that reads notices
                self.answer(block, end - begin)

    def close(self) -> None:
        """Waits for the blocks that are on the device."""
        self.flight.put(None)
        self.thread.join(END_SECONDS)
