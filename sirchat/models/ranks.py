"""Tensor parallelism: rank 0 runs the program, and the other ranks repeat what it does to tensors.

`torchrun` starts N processes, the ranks. Each rank has a part of the model, and its caches and
archives have the keys and values of its own heads. Model, caches and archives are *shared* objects:
they exist on every rank. Only rank 0 has ledger, policy, prompt, files and server; rank 0 calls a
method of a shared object as if there were no other ranks. The call, with row numbers but without
keys and values, is added to a message. The message is sent when the ranks next have to compute
something together, usually the next token. So an eviction needs no message of its own. The other
ranks run `follow`.

Messages are pickled, like those of torch's own object collectives, since all ranks belong to the
same user.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import sys
import threading
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import wraps
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.errors import LostRankError, SirchatError
from sirchat.memory.segments import Rows

_FOREVER = timedelta(days=365)  # a user may take long to type the next message
_INLINE = 248  # most bytes of a message that one broadcast can send
_ENDING = "sirchat ends"
"""A key in torchrun's store; rank 0 sets it if it ends and reports the reason itself."""


def by_torchrun() -> bool:
    """Whether torchrun has started this process as one of several that share a model.

    False in `sirchat train`, where each process has the whole model.
    """
    if sys.argv[1:2] == ["train"]:
        return False
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


class Ranks:
    """The processes (ranks) that share a model, as one of these processes sees them.

    Attributes:
        rank: number of this process; rank 0 runs the program.
        count: number N of processes.
        failure: why the processes can't go on, in one line; "" if nothing has failed.
        messages, nbytes: numbers of messages and bytes that this process has sent, by kind:
            `calls`, `statistics` and `rows`.
    """

    def __init__(self, root: Any, classes: Mapping[type, type]) -> None:
        import torch.distributed as dist

        self._dist = dist
        self._classes: Mapping[type, Any] = classes
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, timeout=_FOREVER)
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self._store = dist.distributed_c10d._get_default_store()
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu"
        self.failure = ""
        self.messages, self.nbytes = Counter[str](), Counter[str]()
        self._lock, self._is_inside = threading.RLock(), False
        self._losing, self._is_ending = threading.Lock(), False
        self._waiting = bytearray()  # pickled calls, not sent yet to the other ranks
        self._shared: dict[int, Any] = {}  # on other ranks: objects by number
        self._numbers: dict[int, int] = {}  # on rank 0: their numbers, by id
        self._released: list[int] = []
        self._next = 0
        self._links = dist.new_group(backend="gloo", timeout=_FOREVER)
        self._watches: list[threading.Thread] = []
        self.root = self.share(root)
        """The first object that all ranks share; its methods make the other shared objects."""
        for rank in range(1, self.count if self.rank == 0 else 1):
            watch = threading.Thread(target=self._watch, args=(rank,), daemon=True)
            self._watches.append(watch)
            watch.start()

    def share(self, made: Any) -> Any:
        """Make the object `made`, which every rank has just made, a shared object; returns `made`.

        The object gets a number. From now on, when rank 0 calls a method of the object that
        `on_all_ranks` names, all ranks call the method.
        """
        number, self._next = self._next, self._next + 1
        if self.rank:
            self._shared[number] = made
            return made
        object.__setattr__(made, "__class__", self._classes[type(made)])
        self._numbers[id(made)] = number
        weakref.finalize(made, self._release, id(made), number).atexit = False
        return made

    def _release(self, ident: int, number: int) -> None:
        del self._numbers[ident]
        self._released.append(number)

    def call(self, method: Method, one: Any, args: Any, options: Any) -> Any:
        """On rank 0: call `method` of the shared object `one` on every rank; returns the result.

        `Rows` (keys and values) in the arguments and the result have all heads; each rank gets, or
        gives, only the heads that it has.
        """
        with self._lock:
            if self._is_inside:
                return method.run(one, *args, **options)
            if self.failure:
                raise LostRankError(self.failure)
            self._is_inside = True
            try:
                call = self._pickled((self._numbers[id(one)], method.name, args, options))
                if method.meets:
                    self._waiting += call
                    return self._met(method, one, args, options)
                result = self._run(method.run, one, args, options)
                self._waiting += call
                return result
            finally:
                self._is_inside = False

    def _met(self, method: Method, one: Any, args: Any, options: Any) -> Any:
        """Run a method together with the other ranks; returns the method's result.

        Before, the calls that wait for the next message are sent to the other ranks.
        """
        try:
            self._send()
            return self._run(method.run, one, args, options)
        except BaseException as error:
            if not _is_common(error):
                for watch in self._watches:
                    watch.join(2)  # the watch sets `failure` if a rank has ended
                self._lose(f"{type(error).__name__}: {error}")
            raise

    def _run(self, run: Callable[..., Any], one: Any, args: Any, options: Any) -> Any:
        mine = [self._own(value) if isinstance(value, Rows) else value for value in args]
        result = run(one, *mine, **options)
        if type(result) in self._classes:
            return self.share(result)
        if isinstance(result, Rows):
            tensors = [self.joined(tensor, 0) for tensor in result.tensors]
            return Rows(result.positions, result.written_at, tensors)
        if isinstance(result, dict):  # statistics
            return {name: self._mean_of(values) for name, values in result.items()}
        return result

    def _own(self, rows: Rows) -> Rows:
        tensors = [one.chunk(self.count)[self.rank] for one in rows.tensors]
        return Rows(rows.positions, rows.written_at, tensors).to(self.device)

    def _mean_of(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        mean: NDArray[np.float64] = self.mean(torch.from_numpy(values)).numpy()
        return mean

    def mean(self, one: Tensor) -> Tensor:
        """Average the tensors `one` of all ranks, which each rank computes from its own heads."""
        self._count("statistics", one)
        one = one.clone()
        self._dist.all_reduce(one)
        return one / self.count

    def joined(self, one: Tensor, dim: int) -> Tensor:
        """On rank 0: join the tensors `one` of all ranks along the dimension `dim`.

        Rank 0 gets the joined tensor; every other rank gets its own `one`.
        """
        if not one.numel():
            return torch.cat([one] * self.count, dim)
        self._count("rows", one)
        whole = one.contiguous()
        parts = [torch.empty_like(whole) for _ in range(self.count)] if self.rank == 0 else None
        self._dist.gather(
            whole.view(torch.uint8), [part.view(torch.uint8) for part in parts] if parts else None
        )
        return one if parts is None else torch.cat(parts, dim)

    def _count(self, kind: str, sent: Tensor) -> None:
        self.messages[kind] += 1
        self.nbytes[kind] += sent.nbytes

    def _pickled(self, call: object) -> bytes:
        buffer = io.BytesIO()
        _Pickler(buffer, self._numbers).dump(call)
        return buffer.getvalue()

    def _send(self) -> None:
        """Send the message with the waiting method calls to the other ranks.

        The message also has the numbers of shared objects that rank 0 no longer uses.
        """
        while self._released:
            self._waiting += self._pickled((self._released.pop(), "", (), {}))
        body, self._waiting = torch.frombuffer(self._waiting, dtype=torch.uint8), bytearray()
        self._broadcast(len(body), body[:_INLINE])
        if len(body) > _INLINE:
            self._count("calls", body)
            self._dist.broadcast(body, 0)

    def _broadcast(self, size: int, body: Tensor) -> None:
        head = torch.zeros(_INLINE + 8, dtype=torch.uint8)
        head[:8] = torch.tensor([size]).view(torch.uint8)
        head[8 : 8 + len(body)] = body
        self._count("calls", head)
        self._dist.broadcast(head, 0)

    def _receive(self) -> bytes | None:
        """On ranks other than 0: wait for the next message; returns None if rank 0 ends instead."""
        head = torch.zeros(_INLINE + 8, dtype=torch.uint8)
        self._dist.broadcast(head, 0)
        size = int(head[:8].view(torch.int64))
        if size < 0:
            return None
        if size <= _INLINE:
            return head[8 : 8 + size].numpy().tobytes()
        body = torch.zeros(size, dtype=torch.uint8)
        self._dist.broadcast(body, 0)
        return body.numpy().tobytes()

    def follow(self) -> int:
        """On ranks other than 0: repeat rank 0's calls until rank 0 ends; returns the exit code."""
        try:
            while (message := self._receive()) is not None:
                buffer = io.BytesIO(message)
                while buffer.tell() < len(message):
                    self._repeat(*_Unpickler(buffer, self._shared).load())
            self._dist.send(torch.zeros(1), 0, group=self._links)
            return 0
        except Exception as error:
            return self._failed(f"{type(error).__name__}: {error}")

    def _repeat(self, number: int, name: str, args: Any, options: Any) -> None:
        if not name:
            del self._shared[number]
            return
        one = self._shared[number]
        try:
            self._run(getattr(type(one), name), one, args, options)
        except Exception as error:  # a call that had no error on rank 0 must have none here
            if name not in self._classes[type(one)].now or not _is_common(error):
                raise

    def _failed(self, error: str) -> int:
        """On ranks other than 0: report an error to rank 0; returns the exit code 1.

        If rank 0 does not answer within three seconds, rank 1 writes to standard error that rank 0
        has ended.
        """
        with suppress(RuntimeError):
            self._store.set(f"sirchat {self.rank}", error)
            try:
                self._store.wait([_ENDING], timedelta(seconds=3))
            except RuntimeError:
                if self.rank == 1:
                    sys.stderr.write(f"sirchat: process 0 of {self.count} has ended\n")
        return 1

    def _watch(self, rank: int) -> None:
        """On rank 0, in a thread: wait until the given rank ends.

        If that rank has failed, the program is ended.
        """
        try:
            self._dist.recv(torch.zeros(1), rank, group=self._links)
        except RuntimeError:
            key, why = f"sirchat {rank}", ""
            with suppress(RuntimeError):
                if self._store.check([key]):
                    why = f": {self._store.get(key).decode()}"
            self._lose(f"process {rank} of {self.count} has ended{why}")

    def _lose(self, why: str) -> None:
        """Write into `failure` why the ranks can't go on, and end the program by SIGTERM."""
        with self._losing:
            if self.failure or self._is_ending:
                return
            self.failure = " ".join(why.split())
        self._tell_ending()
        os.kill(os.getpid(), signal.SIGTERM)

    def _tell_ending(self) -> None:
        with suppress(RuntimeError):
            self._store.set(_ENDING, "")

    def end(self) -> None:
        """On rank 0, at the end of the program: let the other ranks end, too."""
        self._tell_ending()
        if self.failure or not self._lock.acquire(timeout=1):
            return  # the others notice that this process ends
        self._is_ending = True
        self._broadcast(-1, torch.zeros(0, dtype=torch.uint8))
        for watch in self._watches:
            watch.join()
        self._dist.destroy_process_group()


def _is_common(error: BaseException) -> bool:
    """Whether an error is of a kind that every rank raises before the ranks compute together."""
    return isinstance(error, SirchatError) or type(error) is LookupError


class Method:
    """A method of shared objects, and whether the other ranks can run it later than rank 0.

    Attributes:
        run: the method, to be run on one rank.
        name: the method's name.
        meets: whether the ranks compute something together in the method. If so, a call of the
            method can't wait for the next message.
    """

    def __init__(self, run: Callable[..., Any], *, meets: bool) -> None:
        self.run, self.name, self.meets = run, run.__name__, meets


def on_all_ranks(
    kind: type, ranks: Callable[[], Ranks], later: tuple[str, ...], now: tuple[str, ...] = ()
) -> type:
    """Make a subclass of `kind` for rank 0; a call of one of its methods is made on all ranks.

    Args:
        kind: the class that the objects have on other ranks.
        ranks: returns the processes that share the model.
        later: names of the methods that the other ranks run only when the next message comes.
        now: names of the methods in which the ranks compute something together; all ranks run them
            at once.
    """

    def called(method: Method) -> Callable[..., Any]:
        @wraps(method.run)
        def call(self: Any, *args: Any, **options: Any) -> Any:
            return ranks().call(method, self, args, options)

        return call

    methods = [Method(getattr(kind, name), meets=name in now) for name in (*later, *now)]
    own = {one.name: called(one) for one in methods}
    return type(kind.__name__, (kind,), {**own, "now": frozenset(now)})


class _Pickler(pickle.Pickler):
    """Pickles method calls: shared objects become their numbers, and row numbers are compressed."""

    def __init__(self, file: io.BytesIO, numbers: dict[int, int]) -> None:
        super().__init__(file, protocol=5)
        self._numbers = numbers

    def persistent_id(self, one: Any) -> int | None:
        return self._numbers.get(id(one))

    def reducer_override(self, one: Any) -> Any:
        if isinstance(one, Tensor):
            is_half = one.dtype == torch.bfloat16  # numpy has no such type
            return _tensor, ((one.view(torch.int16) if is_half else one).cpu().numpy(), is_half)
        if isinstance(one, np.ndarray) and one.dtype == np.int64 and one.ndim == 1:
            return _numbers, (zlib.compress(np.diff(one, prepend=0).tobytes(), 1),)
        return NotImplemented


def _numbers(packed: bytes) -> NDArray[np.int64]:
    """Decompress row numbers [n], which were packed as their differences.

    Row numbers are often consecutive, so that their differences take few bytes.
    """
    return np.frombuffer(zlib.decompress(packed), np.int64).cumsum()


def _tensor(values: NDArray[Any], is_half: bool) -> Tensor:
    found = torch.from_numpy(values)
    return found.view(torch.bfloat16) if is_half else found


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: dict[int, Any]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, number: Any) -> Any:
        return self._shared[number]
