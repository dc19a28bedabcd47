"""Every process that the package starts ends with its parent, however that ends."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from audio_case import write_model
from server_case import wait_for
from test_command import ROOT, Command

from megatron_infer.utils import child_process

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
START = """import signal, sys
from megatron_infer.utils.child_process import ChildProcess, end_with_parent
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run where it is ignored
"""
CHILD = """
import os, signal, subprocess, sys, time
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
grandchild = subprocess.Popen(["sleep", "600"])
print(os.getpid(), grandchild.pid, flush=True)
if sys.argv[1:] == ["stopped"]:
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(600)
"""


def is_gone(pid):
    """Whether a process has ended; one that its parent has not waited for has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def parent_of(code, *arguments):
    """A process that runs `code` and prints the ids of what it has started -> (process, ids)."""
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)
    ids = [int(word) for word in process.stdout.readline().split()]
    assert ids and not any(map(is_gone, ids))
    return process, ids


def killed(process, ids, number=signal.SIGKILL):
    """The parent ends; then all of its processes do."""
    with process:
        process.send_signal(number)
    wait_for(lambda: all(map(is_gone, ids)))


def test_child_has_a_group_of_its_own_in_the_session_of_its_parent():
    """Niceness counts within a session only, where the system schedules by sessions."""
    with child_process.ChildProcess(["sleep", "600"]) as child:
        wait_for(lambda: os.getpgid(child.pid) == child.pid)
        assert os.getsid(child.pid) == os.getsid(0)
        child.end()


AT_TERMINAL = """
import termios
settings = termios.tcgetattr(2)
settings[3] |= termios.TOSTOP
termios.tcsetattr(2, termios.TCSANOW, settings)
print("code", ChildProcess([sys.executable, "-c", sys.argv[1]]).wait(60), flush=True)
"""


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("import sys; print('a line of the log', file=sys.stderr)", "a line of the log"),
        ("import sys; print(repr(sys.stdin.readline()))", "Input/output error"),
    ],
)
def test_child_is_not_stopped_by_the_terminal_of_its_parent(code, shown):
    """A terminal that stops jobs of the background that write, or any that read."""
    pid, terminal = pty.fork()
    if not pid:
        os.execv(sys.executable, [sys.executable, "-c", START + AT_TERMINAL, code])
    output = b""
    with contextlib.suppress(OSError):  # its other end is closed
        while data := os.read(terminal, 4096):
            output += data
    os.waitpid(pid, 0)
    os.close(terminal)
    assert shown.encode() in output and b"code " in output, output


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("how", ["", "stopped"])
def test_child_and_what_it_has_started_end_with_their_parent(number, how):
    killed(*parent_of(START + "ChildProcess([sys.executable, '-c', *sys.argv[1:]]).wait()", CHILD, how), number)


def test_child_of_a_parent_that_ends_at_once_ends_too():
    code = """
import os
children = [ChildProcess(["sleep", "600"]) for _ in range(20)]
print(*[child.pid for child in children], flush=True)
os._exit(1)
"""
    ended = subprocess.run([sys.executable, "-c", START + code], stdout=subprocess.PIPE, text=True)
    ids = [int(word) for word in ended.stdout.split()]
    assert len(ids) == 20
    wait_for(lambda: all(map(is_gone, ids)))


def test_child_outlives_the_thread_that_started_it():
    code = """
import threading, time
def start():
    global child
    child = ChildProcess(["sleep", "600"])
thread = threading.Thread(target=start)
thread.start()
thread.join()
time.sleep(0.3)
print(child.pid, flush=True)
time.sleep(600)
"""
    killed(*parent_of(START + code))


def test_child_ends_with_its_parent_though_a_process_that_the_parent_forked_goes_on():
    code = """
import os, time
child = ChildProcess(["sleep", "600"])
if forked := os.fork():
    print(child.pid, forked, flush=True)
else:
    os.close(1)
    time.sleep(600)
os._exit(0)
"""
    ended = subprocess.run([sys.executable, "-c", START + code], stdout=subprocess.PIPE, text=True)
    child, forked = map(int, ended.stdout.split())
    try:
        wait_for(lambda: is_gone(child))
        assert not is_gone(forked)
    finally:
        os.kill(forked, signal.SIGKILL)


def test_what_a_child_leaves_ends_with_it_and_another_one_goes_on():
    with child_process.ChildProcess([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True) as other:
        leaving = ["sh", "-c", "sleep 600 >/dev/null & echo $!"]
        with child_process.ChildProcess(leaving, stdout=subprocess.PIPE, text=True) as one:
            left = int(one.stdout.readline())
        assert one.returncode == 0
        wait_for(lambda: is_gone(left))
        ids = [int(word) for word in other.stdout.readline().split()]
        assert not any(map(is_gone, ids))
        assert other.end() == -signal.SIGKILL
    wait_for(lambda: all(map(is_gone, ids)))


def test_child_is_told_to_end_and_killed_where_it_does_not():
    drains = "trap 'exit 3' TERM; echo; while :; do sleep 0.05; done"
    for code, timeout_s, ended in ((drains, 60, 3), ("trap '' TERM; echo; sleep 600", 0.3, -signal.SIGKILL)):
        with child_process.ChildProcess(["sh", "-c", code], stdout=subprocess.PIPE) as child:
            assert child.stdout.readline() == b"\n"
            assert child.end(signal.SIGTERM, timeout_s=timeout_s) == ended


def test_command_is_run_to_its_end_or_its_time():
    done = child_process.run(["sh", "-c", "echo out; echo err >&2; exit 3"], timeout_s=60)
    assert (done.stdout, done.stderr, done.returncode) == ("out\n", "err\n", 3)
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired, match=r"Command '\['sh', '-c', 'sleep 600"):
        child_process.run(["sh", "-c", "sleep 600; echo"], timeout_s=0.5)
    assert time.monotonic() - began < 60
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        child_process.run(["no-such-program"])


@pytest.mark.few
@pytest.mark.parametrize("method", ["forkserver", "fork", "spawn"])
def test_process_of_multiprocessing_ends_with_its_parent_and_not_before(tmp_path, method):
    code = f"""
import multiprocessing, os, time
from megatron_infer.utils import child_process
def child():
    child_process.end_with_parent()
    time.sleep(4 * child_process.POLL_S)
    print(os.getpid(), flush=True)
    time.sleep(600)
if __name__ == "__main__":
    multiprocessing.get_context({method!r}).Process(target=child).start()
    time.sleep(600)
"""
    (tmp_path / "case.py").write_text(code)
    killed(*parent_of(f"import runpy; runpy.run_path({str(tmp_path / 'case.py')!r}, run_name='__main__')"))


def test_peers_of_a_benchmark_end_with_it(tmp_path):
    (tmp_path / "adapter.py").write_text(CHILD.replace("print(", "print(*[").replace(", flush", "], flush"))
    code = f"""
import sys, time
from pathlib import Path
sys.path.append({str(ROOT / "tools" / "bench")!r})
import peers
peers.ADAPTER = Path({str(tmp_path / "adapter.py")!r})
peer = peers.Peer("transformers", sys.executable, {{}}, Path({str(tmp_path / "log")!r}))
print(peer._process.stdout.readline().decode(), flush=True)
time.sleep(600)
"""
    killed(*parent_of(code))


def descendants(pid):
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
    found = {pid}
    while more := {one for one, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def role_of(pid):
    return re.findall(r"subprocess_main\0(\w+)", Path(f"/proc/{pid}/cmdline").read_text())


OTHER_WAYS = r"subprocess\.(?:Popen|run|call|check_\w+)\(|os\.(?:fork|spawn\w+|popen|system)\("
SIZES = ("--dtype", "float32", "--buffer-size-gb", "0.02", "--threads", "1")
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "roles"),
    [
        ((), ["audio_decoder", "coordinator", "engine", "engine", "http_worker", "http_worker"]),
        (LAUNCHER, ["audio_decoder", "coordinator", "http", "http_worker", "http_worker"]),
    ],
)
def test_processes_of_a_server_end_with_the_one_that_was_started(tmp_path, launcher, roles):
    model = write_model(tmp_path / "voice")
    command = Command(str(model), "--dp", "2", "--http-workers", "2", *SIZES, launcher=launcher)
    try:
        command.wait_ready()
        ids = descendants(command.process.pid)
        assert sorted(sum(map(role_of, ids), [])) == roles
        command.process.send_signal(signal.SIGKILL)
        wait_for(lambda: all(map(is_gone, ids)))
    finally:
        command.end()


def test_package_starts_processes_in_one_way():
    """What is started in another way does not end with its parent."""
    for path in sorted((ROOT / "megatron_infer").rglob("*.py")):
        if path != Path(child_process.__file__):
            found = re.findall(OTHER_WAYS, path.read_text())
            assert not found, f"{path}: {found}: take utils.child_process"
