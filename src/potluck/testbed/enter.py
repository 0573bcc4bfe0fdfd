"""Runs a program on an emulated device; started as a file of its own, with nothing but the standard library.

Three processes: the outer one stays in the machine's namespaces, hands signals on and ends as the program ended; the
inner one is the first process of a new process namespace, so that the kernel ends everything in it when it goes;
the third becomes the program.
"""

import argparse
import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

NAMESPACES = Path("/run/netns")
CANNOT_ENTER = 125  # what env, timeout and docker say when they themselves fail
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUTS = 0x04000000
_CLONE_NEWPID = 0x20000000
_CLONE_NEWNET = 0x40000000
_MS_NOSUID_NODEV_NOEXEC = 2 | 4 | 8
_MS_BIND = 4096
_MS_REC = 16384
_MS_PRIVATE = 1 << 18
_PR_SET_PDEATHSIG = 1
_HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    done = _libc.mount(source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), None)
    _check(done, f"mount {source} on {target}")


def _enter_namespaces(namespace: str, hostname: str, binds: list[list[str]]) -> None:
    with (NAMESPACES / namespace).open("rb") as file:
        _check(_libc.setns(file.fileno(), _CLONE_NEWNET), f"enter network namespace {namespace}")
    _check(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWPID), "make namespaces")
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    directory = Path.cwd()
    for source, target in binds:
        _mount(source, target, None, _MS_BIND)
    os.chdir(directory)  # or it stays where a folder of the device now hides it
    _show_network_of_namespace()
    hostname_bytes = hostname.encode()
    _check(_libc.sethostname(hostname_bytes, ctypes.c_size_t(len(hostname_bytes))), "set the host name")


def _show_network_of_namespace() -> None:
    """A new /sys, whose class/net is the device's; the cgroups, where programs look for their memory limit, stay."""
    cgroups = Path("/sys/fs/cgroup")
    kept = os.open(cgroups, os.O_PATH) if cgroups.is_dir() else None
    _mount("sysfs", "/sys", "sysfs", _MS_NOSUID_NODEV_NOEXEC)
    if kept is not None:
        _mount(f"/proc/self/fd/{kept}", str(cgroups), None, _MS_BIND | _MS_REC)
        os.close(kept)


def _hand_on_to(pid: int, group_at_interrupt: bool) -> None:
    def hand_on(number: int, frame: object) -> None:
        try:
            if group_at_interrupt and number == signal.SIGINT and os.getpgid(pid) == pid:
                os.killpg(pid, number)
            else:
                os.kill(pid, number)
        except ProcessLookupError:
            pass  # it has just ended

    for number in _HANDED_ON:
        signal.signal(number, hand_on)


def _wait_for(pid: int) -> int:
    """The wait status of ``pid``; other children that end meanwhile are reaped too."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            return status


def _be_the_program(argv: list[str], cgroup: int | None) -> NoReturn:
    os.setsid()
    for number in _HANDED_ON:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and a program would inherit that
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    try:
        if cgroup is not None:
            os.write(cgroup, b"0")
    except OSError as error:
        _say(f"its memory cgroup cannot be entered: {error}")
        os._exit(CANNOT_ENTER)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        _say(f"{argv[0]} cannot be run: {error.strerror}")
        os._exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE)


def _be_first_process(argv: list[str], cgroup: int | None, report: int) -> NoReturn:
    """Start the program, reap, and tell how it ended through ``report``: a first process cannot die by a signal."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _mount("proc", "/proc", "proc", _MS_NOSUID_NODEV_NOEXEC)
    program = os.fork()
    if program == 0:
        _be_the_program(argv, cgroup)
    _hand_on_to(program, group_at_interrupt=True)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.write(report, str(_wait_for(program)).encode())
    os._exit(0)


def _end_as(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        _libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: the program may have left a core, this one need not
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def _say(sentence: str) -> None:
    print(f"potluck testbed: {sentence}", file=sys.stderr, flush=True)


def main() -> NoReturn:
    """Enter the device named by the options and run the program after them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--hostname", required=True)
    parser.add_argument("--cgroup")
    parser.add_argument("--bind", nargs=2, action="append", default=[])
    parser.add_argument("argv", nargs="+")
    options = parser.parse_args()
    # a signal that comes before there is somebody to hand it to waits
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDED_ON)
    try:
        cgroup = os.open(Path(options.cgroup) / "cgroup.procs", os.O_WRONLY) if options.cgroup else None
        _enter_namespaces(options.namespace, options.hostname, options.bind)
        reported, report = os.pipe()
        first = os.fork()
        if first == 0:
            os.close(reported)
            _be_first_process(options.argv, cgroup, report)
        os.close(report)
    except OSError as error:
        _say(f"{options.hostname} cannot be entered: {error}; is the testbed up, and are you root?")
        os._exit(CANNOT_ENTER)
    _hand_on_to(first, group_at_interrupt=False)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    status = _wait_for(first)
    told = os.read(reported, 16)
    _end_as(int(told) if told else status)


if __name__ == "__main__":
    main()
