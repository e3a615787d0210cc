"""Being here puts this folder on the import path, so that tests of several packages share helpers."""

import functools
import gc
import os
from collections.abc import Generator

import pytest
import typer.testing
from examples import SHORT
from hypothesis import settings

# One thread: the models are tiny, and OpenMP threads that wait for each other on a busy machine are slow.
# What must be right on several threads says so itself (tests/kernels). Torch reads it when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Servers and workers that tests start take their bytecode from the cache, as a user's do: compiling the
# package again in each of them is a fifth of a start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# No test speaks TLS. To read the usual bundle of authorities takes each new HTTP client tens of milliseconds,
# and tests that poll a server make hundreds of them; a folder is only read when a certificate is checked.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = os.path.dirname(__file__)

# No garbage is collected while tests are collected: all that is made then stays, and looking through it again
# and again takes a fifth of the time. It stays out of later collections too (`pytest_collection`).
gc.disable()

import torch  # noqa: E402

# Without a device Triton kernels run in its interpreter, which must be known before triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The command line is built once: to build all of it takes a tenth of a second, and hundreds of tests call a
# command.
typer.testing._get_command = functools.cache(typer.testing._get_command)

settings.load_profile(SHORT)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
