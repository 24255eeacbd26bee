"""Sequences: calls of a model, one after the other, that share a state on the server."""

from __future__ import annotations

import operator
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Optional

from . import _errors, _wire
from ._errors import Error
from ._link import Link, Steps, driven

if TYPE_CHECKING:
    from ._client import Client, Out, Timings
    from ._run import Run


class Sequence:
    """A series of calls of a model, its steps, that share a state on the server. Client.sequence begins one.

    A step that fails after it has begun ends the sequence. Leaving its with, or dropping it, ends it, too.
    It is for any thread; while one is in a step, others are refused.
    """

    def __init__(self, client: Client, model: str, max_rows: int, params: Optional[Mapping[str, Any]]):
        self._client, self._model = client, model
        texts = {key: str(value) for key, value in (params or {}).items()}
        self._ask = {"model": model, "max_rows": operator.index(max_rows), "params": texts}
        self._link: Optional[Link] = None
        self._number = 0  # on the link
        self._turn = threading.Lock()
        self._run: Optional[Run] = None  # of the last step
        self._said = b'{"rows":0}'  # of the last step that was answered; few ask for it

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        link = getattr(self, "_link", None)
        if link is not None:
            link.later(_wire.ASK, self._number)

    def __repr__(self) -> str:
        return f"<tensorferry.Sequence of {self._model}, {self.rows} rows{', closed' if self._link is None else ''}>"

    def _begin(self) -> Steps[Sequence]:
        said = yield from self._client._ask("sequence", 30.0, **self._ask)
        self._link, self._number = self._client._link, int(said["connection"])
        return self

    @driven
    def step(
        self,
        x: Any = None,
        /,
        *,
        timeout: Optional[float] = None,
        out: Optional[Mapping[str, Out]] = None,
        **inputs: Any,
    ) -> Steps[Any]:
        """Run the model on the next rows of its input, or of its inputs by name, and return theirs of the result.

        Several results are a dict by port. timeout is for the server, in seconds. out is that of Client.call.
        """
        if not self._turn.acquire(False):
            raise _errors.FailedPrecondition("another step of the sequence is under way", hint="wait for its result")
        try:
            if self._link is None:
                raise ValueError(f"the sequence {'is closed' if self._number else 'has not begun: use async with'}")
            if (x is None) == (not inputs):
                raise TypeError("step takes a tensor, or every input by name: step(x=…, mask=…)")
            if out is not None and not isinstance(out, Mapping):
                raise TypeError('out is by result: out={"y": array}')
            given = inputs or {"": x}
            of = self._link, self._number
            self._run = run = yield from self._client._start("", given, None, timeout, out, None, None, of=of)
            yield from run.finish(None)
            outputs = run.collect()
            self._said = run.raw
        finally:
            self._turn.release()
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    @driven
    def close(self) -> Steps[None]:
        """End the sequence. A second time is a no-op."""
        link, self._link = self._link, None
        if link is not None and link.dead is None:
            try:
                yield from link.asking("disconnect", 30.0, connection=self._number)
            except Error:
                pass  # it has ended all the same

    @property
    def rows(self) -> int:
        """How many rows have been answered."""
        return int(_wire.from_json(self._said)["rows"])

    @property
    def timings(self) -> Optional[Timings]:
        """Where the time of the last step went, None before it has ended."""
        from ._client import Timings

        return Timings(*[n / 1e9 for n in self._run.timings]) if self._run and self._run.timings else None
