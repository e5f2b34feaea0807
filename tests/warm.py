"""Processes that start warm: forked from one that has made its imports, instead of importing for 10 to 20 seconds.

    warm.start()                                       # once, where many processes of this project are to come
    subprocess.Popen([sys.executable, "-m", "vllm_server", "--model", …])    # as ever, but forked

The forked process is a child of the process that asked for it. It has the arguments, environment, folder, files and
session that were asked for, and runs the module as `__main__`. What it starts itself in the same way is forked from it,
too. Variables that a library reads while it is imported have no effect; a test that needs them sets `COLD`.

Workers of pytest-xdist are forked in the same way. Each of them first forks the process that will fork for it, so that
the imports are made once for all workers.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import logging
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, NoReturn

from execnet.gateway_io import popen_bootstrapline

from vllm_server import forking

COLD = "GRPO_TESTS_COLD"
PACKAGES = ("grpo_trainer", "vllm_server", "environments", "tests")
ROOT = Path(__file__).parents[1]
WORKER = [sys.executable, "-u", "-c", popen_bootstrapline]
"""The command of a worker of pytest-xdist."""

ENVIRONMENTS = (
    *("environments.running.cli", "environments.multi_turn", "environments.arithmetic"),
    *("environments.maths.judge_worker", "transformers.models.auto.tokenization_auto"),
    "transformers.models.qwen2.tokenization_qwen2",
)
"""What an environment and its judges import."""
TRAINERS = (
    *ENVIRONMENTS,
    *("grpo_trainer.loop", "grpo_trainer.cli", "transformers.models.qwen2.modeling_qwen2", "tests.unit.factories"),
)
"""What a trainer and an environment import, those of tests too."""
RUNS = (
    # The server's half of vLLM and the engine's; and what else `grpo run` starts.
    *("vllm_server.serve", "vllm_server.worker.extension"),
    *("vllm_server.worker.preload", *TRAINERS, "grpo_trainer.run"),
    *("environments.api.server", "uvicorn", "uvloop", "tests.calm_workers"),
    "vllm.model_executor.layers.quantization.online.base",  # imported when a model is loaded, whatever its quantization
)
"""What a whole run imports, servers with it."""

_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PDEATHSIG = 1

_exec_child = subprocess.Popen._execute_child  # pyright: ignore[reportAttributeAccessIssue]
_exec = os.execve
_zygote: socket.socket | None = None
_imported: frozenset[str] = frozenset()
_packages = PACKAGES
_forked = False
_asking = threading.Lock()


def start(modules: Sequence[str] = RUNS, packages: Sequence[str] = PACKAGES) -> None:
    """Start the process that imports these, unless one that has is there; what is started meanwhile waits for it.

    Args:
        packages: whose programs are forked from then on; all others start as ever.
    """
    global _zygote, _imported, _packages
    subprocess.Popen._execute_child = _fork_child  # pyright: ignore[reportAttributeAccessIssue]
    if _imported.issuperset(modules):
        return
    _packages = tuple(packages)
    if _zygote is not None:
        _zygote.close()  # which ends it
    _zygote, theirs = socket.socketpair()
    _imported = frozenset(modules)
    command = [sys.executable, "-m", "tests.warm", str(theirs.fileno()), *modules]
    environment = {**os.environ, COLD: "1"}
    subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment)
    theirs.close()


def _fork_child(
    self: subprocess.Popen[Any], args: Any, executable: Any, preexec_fn: Callable[[], None] | None, close_fds: bool,
    pass_fds: Sequence[int], cwd: Any, env: Mapping[str, str] | None, startupinfo: Any, creationflags: int,
    shell: bool, p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int, errread: int, errwrite: int, *rest: Any,
) -> None:  # fmt: skip
    """`Popen._execute_child`, for what can be forked."""
    environment = dict(os.environ if env is None else env)
    # The one function that can be repeated in the child of another process: the child ends with its parent.
    ends_with_parent = getattr(preexec_fn, "__module__", "") == "grpo_trainer.launch.process"
    if not _can_be_forked(args, environment, shell=shell, other=bool(executable or pass_fds)) or (
        preexec_fn and not (_forked or ends_with_parent)
    ):
        _exec_child(
            self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *rest,
        )  # fmt: skip
        return
    *_, new_session, process_group = rest
    wanted = {
        "words": [os.fspath(word) for word in args[2:]],
        "environment": environment,
        "folder": os.fspath(cwd or Path.cwd()),
        "new_session": bool(new_session),
        "process_group": process_group,
        "ends_with_parent": ends_with_parent,
    }
    given = [theirs if theirs != -1 else own for theirs, own in ((p2cread, 0), (c2pwrite, 1), (errwrite, 2))]
    self.pid = _fork(wanted, given, preexec_fn) if _forked else _ask(wanted, given)
    self._child_created = True  # pyright: ignore[reportAttributeAccessIssue]
    pipes = {theirs for theirs, ours in ((p2cread, p2cwrite), (c2pwrite, c2pread), (errwrite, errread)) if ours != -1}
    for descriptor in {*pipes, getattr(self, "_devnull", -1)} - {-1}:
        os.close(descriptor)
    self._closed_child_pipe_fds = True  # pyright: ignore[reportAttributeAccessIssue]


def _can_be_forked(args: Any, environment: Mapping[str, str], *, shell: bool, other: bool) -> bool:
    if isinstance(args, str | bytes) or shell or other or COLD in environment:
        return False
    words = [os.fspath(word) for word in args]
    if words == WORKER:
        return True
    return words[:2] == [sys.executable, "-m"] and words[2].partition(".")[0] in _packages


def _ask(wanted: dict[str, Any], given: list[int]) -> int:
    """Have the zygote fork a child of this process; returns its process id."""
    assert _zygote is not None
    with _asking:
        return _ask_alone(_zygote, wanted, given)


def _ask_alone(zygote: socket.socket, wanted: dict[str, Any], given: list[int]) -> int:
    libc = ctypes.CDLL(None)
    message = json.dumps(wanted).encode()
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # for the moment in which the child loses the zygote as its parent
    try:
        socket.send_fds(zygote, [len(message).to_bytes(8)], given)
        zygote.sendall(message)
        answer = zygote.recv(8)
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)
    assert answer, "the process with the imports has ended; its traceback is above"
    return int.from_bytes(answer)


def _fork(wanted: dict[str, Any], given: list[int], preexec_fn: Callable[[], None] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pid = os.fork()
    if pid:
        return pid
    # The parent's objects stay: to free them may need locks which its threads, such as Ray's, held. vLLM's engine wants
    # to visit them when it ends, which takes half a second and copies every page that is shared with the parent.
    gc.freeze()
    gc.unfreeze = _nothing
    status = 1
    try:
        status = _become(wanted, given, preexec_fn)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def _become(wanted: dict[str, Any], given: list[int], preexec_fn: Callable[[], None] | None) -> int:
    """In the new process: what `exec` and the interpreter's start would have done, and the module."""
    global _forked
    kept = [os.dup(descriptor) for descriptor in given]
    for number, descriptor in enumerate(kept):
        os.dup2(descriptor, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < 65536 else 65536)
    if wanted["new_session"]:
        os.setsid()
    elif wanted["process_group"] is not None and wanted["process_group"] >= 0:
        os.setpgid(0, wanted["process_group"])
    if preexec_fn:
        preexec_fn()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    os.environ.clear()
    os.environ.update(wanted["environment"])
    tempfile.tempdir = None  # TMPDIR may be another
    os.chdir(wanted["folder"])
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # pyright: ignore[reportAttributeAccessIssue]
    logging.root.handlers.clear()
    atexit._clear()
    if wanted["words"][0] == "-c":
        _fork_zygote()
        return _run(wanted["words"])
    _forked = True
    subprocess.Popen._execute_child = _fork_child  # pyright: ignore[reportAttributeAccessIssue]
    os.execve = _run_instead
    # An engine is forked from its server, which has its imports, too.
    forking.start, forking.context = _nothing, _fork_context  # pyright: ignore[reportAttributeAccessIssue]
    return _run(wanted["words"])


def _fork_zygote() -> None:
    """In a worker of pytest-xdist, which has imported nothing else yet: start the process that forks for its tests."""
    global _zygote, _imported
    _zygote, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        _imported = frozenset(RUNS)
        return
    _zygote.close()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):  # the worker's own are its line to pytest
        os.dup2(nowhere, number)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker ends after Ctrl-C, and this process with it
    try:
        _fork_whatever_is_asked(theirs)
    finally:
        os._exit(0)


def _nothing(*_: object) -> None:
    """In place of what a forked process need not do."""


def _fork_context() -> BaseContext:
    return multiprocessing.get_context("fork")


def _run_instead(path: Any, argv: Any, env: Mapping[str, str]) -> NoReturn:
    """`os.execve`, for what can be run here."""
    if not _can_be_forked(argv, env, shell=False, other=path != sys.executable):
        _exec(path, argv, env)
    os.environ.clear()
    os.environ.update(env)
    sys.exit(_run(list(argv[2:])))


def _run(words: list[str]) -> int:
    """Run a module as `__main__`; returns its exit status."""
    import setproctitle

    module, *arguments = words
    setproctitle.setproctitle(" ".join([sys.executable, *([] if module == "-c" else ["-m"]), *words]))
    sys.argv = [module, *arguments]
    sys.path[0] = str(Path.cwd())
    try:
        if module == "-c":
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(arguments[0], vars(main))
        else:
            sys.modules.pop(module, None)  # it becomes `__main__`, and may be imported by its name besides
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as error:
        status = _status(error)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)  # as the interpreter ends
        status = 130
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    return status


def _status(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return int(error.code or 0)
    print(error.code, file=sys.stderr)
    return 1


def _serve(descriptor: int, modules: Sequence[str]) -> None:
    """The zygote: import, then fork whatever is asked for, until nobody is there to ask."""
    from vllm_server import flags

    flags.set_environment()
    for name in modules:
        importlib.import_module(name)
    preload = sys.modules.get("vllm_server.worker.preload")
    if preload is not None:
        _make_ready()
        unfit = preload.unfit or forking.spoiled()
        assert not unfit, unfit
    _fork_whatever_is_asked(socket.socket(fileno=descriptor))


def _fork_whatever_is_asked(asking: socket.socket) -> None:
    while True:
        header, given, _, _ = socket.recv_fds(asking, 8, 3)
        if not header:
            return
        length = int.from_bytes(header)
        message = b""
        while len(message) < length:
            message += asking.recv(length - len(message))
        asking.send(_fork_for_another(json.loads(message), given).to_bytes(8))
        for each in given:
            os.close(each)


def _make_ready() -> None:
    """Do what takes each server one or two seconds more."""
    import torch
    from tqdm import tqdm
    from vllm.v1.sample.sampler import Sampler

    from vllm_server import seams

    tqdm.monitor_interval = 0  # a progress bar of the compiler would start a thread
    seams.probe()  # for its imports
    if seams.device_type() != "cpu" or torch.get_num_threads() > 1:
        return  # torch.compile would initialise CUDA, or start threads: a fork would have neither
    with torch.inference_mode():  # as in an engine, which compiles this at its first request for logprobs
        for vocabulary in (97, 101):  # two sizes, so that a third is not compiled again
            Sampler.gather_logprobs(torch.zeros(2, vocabulary), 1, torch.zeros(2, dtype=torch.int64))


def _fork_for_another(wanted: dict[str, Any], given: list[int]) -> int:
    """Fork a child of the process that asked: one whose parent, between, ends at once.

    The child waits for that end, which else would end a child that asks the kernel to be killed with its parent.
    """
    reading, writing = os.pipe()
    between = os.fork()
    if not between:
        number = os.getpid()

        def wait_for_parent() -> None:
            while os.getppid() == number:
                time.sleep(0.001)
            if wanted["ends_with_parent"]:
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

        try:
            os.write(writing, _fork(wanted, given, wait_for_parent).to_bytes(8))
        finally:
            os._exit(0)
    os.waitpid(between, 0)
    pid = int.from_bytes(os.read(reading, 8))
    for each in (reading, writing):
        os.close(each)
    return pid


if __name__ == "__main__":
    from tests import warm  # by the name under which the others know it

    warm._serve(int(sys.argv[1]), sys.argv[2:])
