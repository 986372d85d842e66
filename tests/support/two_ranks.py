"""Starts a second process that shares the models of this one, as torchrun would."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from sirchat.models import ranks as ranks_module
from sirchat.models.sharded import end, ranks


@contextmanager
def second_rank() -> Iterator[subprocess.Popen[bytes]]:
    """Within this block, models are loaded by this process, rank 0, and by the one it yields.

    This process gets no signal when the other one has ended.
    """
    store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    shared = {
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "CUDA_VISIBLE_DEVICES": "",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**shared, "RANK": "0", "LOCAL_RANK": "0"}.items():
            patch.setenv(name, value)
        calm = SimpleNamespace(kill=lambda *_: None, getpid=os.getpid, environ=os.environ)
        patch.setattr(ranks_module, "os", calm)
        other = subprocess.Popen(
            [sys.executable, "-m", "sirchat"],
            env={**os.environ, "RANK": "1", "LOCAL_RANK": "1"},
            stderr=subprocess.PIPE,
        )
        try:
            store.set_timeout(timedelta(minutes=5))
            yield other
            if end() == "":  # else one has ended as the test wished
                assert other.wait(60) == 0
        finally:
            other.kill()
            other.communicate()
            for watch in ranks()._watches:
                watch.join()
            ranks.cache_clear()
