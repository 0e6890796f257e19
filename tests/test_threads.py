import subprocess
import sys
import threading

import pytest

from hybridkv.threads import DaemonThreads


def test_calls_run_and_their_errors_reach_whoever_waits():
    threads = DaemonThreads(2, "t")
    assert threads.submit(lambda: 7).result() == 7
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 // 0).result()
    assert threads.submit(lambda: 8).result() == 8
    threads.close()
    for thread in threads._threads:
        thread.join(timeout=30)
        assert not thread.is_alive()


def test_a_cancelled_call_is_skipped():
    threads, gate, ran = DaemonThreads(1, "t"), threading.Event(), []
    first = threads.submit(gate.wait)
    second = threads.submit(lambda: ran.append(1))
    third = threads.submit(lambda: ran.append(2))
    assert second.cancel()
    gate.set()
    first.result()
    third.result()
    assert ran == [2]
    threads.close()


def test_a_call_that_hangs_does_not_keep_the_process():
    script = (
        "import threading; from hybridkv.threads import DaemonThreads\n"
        "threads = DaemonThreads(1, 't'); threads.submit(threading.Event().wait); threads.close()"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0
