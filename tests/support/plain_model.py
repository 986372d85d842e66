"""`load_model` without the compiled library, which rounds in another way and takes seconds."""

from __future__ import annotations

from functools import partial

from sirchat.models import load

load_model = partial(load.load_model, compile="off")
