from __future__ import annotations

import subprocess
import sys

_THREADS = """
import torch
from takifugu.train.ahead import working_ahead
torch.set_num_threads(2)
with working_ahead() as ahead:
    def told():
        torch.ones(4096, 64).sum()  # a thread's number of threads is settled by its first product
        return torch.get_num_threads()
    print(ahead.submit(told).result(), told(), ahead.submit(told).result())
print(told())
"""


def test_the_worker_computes_alone_and_the_training_as_before() -> None:
    # In a process of its own: the number of threads is the process's.
    told = subprocess.run([sys.executable, "-c", _THREADS], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["1", "2", "1", "2"]
